"""`forerun check lossless`: rows, words and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.check.report import Check, Outcome, Report, Row
from forerun.cli import main

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["check", "lossless", *words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_a_table_and_words(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(tiny_model), "-sc", NGRAM, "--num-prompts", "1", "--kv-cache-memory", "16MiB")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["greedy", "ngram", "temperature", "0", "same"] in [line[:5] for line in lines]
    assert ["seeded", "rehearsed", "frequency_penalty", "same"] in [line[:4] for line in lines]
    assert "Passed: no difference was found." in out
    assert "Not checked: " in out


def test_json(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(tiny_model), "-sc", NGRAM, "--num-prompts", "1", "--kv-cache-memory", "16MiB", "--json")
    code, out, _ = run(capsys, *words)
    found = json.loads(out)
    assert code == 0
    assert found["passed"] is True
    assert (found["rule"], found["lossless"]) == ("match", "path")
    assert found["speculative_config"]["method"] == "ngram"
    assert {"check", "proposer", "parameter", "outcome", "num_drafted", "detectable", "detail"} <= found["rows"][
        0
    ].keys()


def test_a_failure_ends_with_1_and_shows_what_differs(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Row(Check.SEEDED, "ngram", "top_k", Outcome.FAILED, 96, 20, 10, None, 0.1, "tokens differ at token 7"),
        Row(Check.LAW, "ngram", "top_k", Outcome.HOLDS, 2000, 900, 400, 0.25, 0.081),
    ]
    monkeypatch.setattr(
        "forerun.check.lossless.check_lossless",
        lambda *_, **__: Report("M", {}, "match", "path", rows, ["FAILED: 1 of 2 rows."]),
    )
    code, out, _ = run(capsys, str(tiny_model), "-sc", NGRAM, "--kv-cache-memory", "16MiB")
    assert code == 1
    assert "FAILED: seeded, top_k, drafts ngram: tokens differ at token 7." in out
    assert "0.081" in out
    assert "0.25" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["M"], "nothing to check without speculation: give --speculative-config"),
        (["M", "-sc", NGRAM, "--expect-lossy"], "--expect-lossy goes with a rule that is lossy, and 'match' is not"),
        (["M", "-sc", NGRAM, "--num-prompts", "0"], "num-prompts"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any weight is read: there is no model M."""
    code, out, err = run(capsys, *words)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
    assert not out


def test_a_lossy_rule_fails(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = '{"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "fly"}'
    code, out, _ = run(capsys, str(tiny_model), "-sc", spec, "--kv-cache-memory", "16MiB")
    assert code == 1
    assert "fly changes the text by design" in out
