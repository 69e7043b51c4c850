"""`forerun demo` compares tokens instead of claiming that they are equal, and says where drafting does not pay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.cli import demo as module
from forerun.cli import main
from forerun.cli.demo import Comparison, pieces, show, verdicts
from forerun.cli.demo_prompts import DEMO_PROMPTS, DemoPrompt
from forerun.engine.messages import RequestMetrics
from forerun.llm import CompletionOutput
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.request import SamplingParams
from forerun.spec.config import SpeculativeConfig
from tests.tiny_tokenizer import save_tiny_tokenizer

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def _answer(ids: list[int], seconds: float, accepted: int = 0, drafted: int = 0) -> CompletionOutput:
    spec = {"mean_acceptance_length": 2.0, "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted}
    flags = [i < accepted for i in range(len(ids))]
    metrics = RequestMetrics(generation_time_s=seconds, speculative_decoding=spec)
    return CompletionOutput(token_ids=ids, drafted=flags, metrics=metrics)


def _comparison(plain_s: float, drafted_s: float, ids: list[int], other: list[int] | None = None) -> Comparison:
    plain = [_answer(ids, plain_s) for _ in range(3)]
    drafted = [_answer(ids if other is None else other, drafted_s, 2, 4) for _ in range(3)]
    return Comparison(DemoPrompt("chat", "Hi"), plain, drafted)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(str(save_tiny_tokenizer(tmp_path)))


def test_speed_is_without_the_prompt_and_passes_without_a_draft_count() -> None:
    comparison = _comparison(2.0, 1.0, [5, 6, 7, 8, 9])
    assert comparison.plain_rate == 2.0  # four tokens after the first, in two seconds
    assert comparison.speedup == 2.0
    assert comparison.tokens_per_pass == 5 / 3  # two accepted, three drawn
    assert comparison.identical


def test_where_drafting_does_not_pay_it_says_so() -> None:
    assert "drafting does not pay here: 0.50 times" in verdicts([_comparison(1.0, 2.0, [5, 6, 7])])[1]
    assert "2.00 times the speed" in verdicts([_comparison(2.0, 1.0, [5, 6, 7])])[1]


def test_other_tokens_are_never_called_identical(tokenizer: Tokenizer) -> None:
    comparison = _comparison(2.0, 1.0, [5, 6, 7], other=[5, 6, 8])
    assert not comparison.identical
    assert "DIFFER for chat" in verdicts([comparison])[0]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, "m", SpeculativeConfig.parse(NGRAM), SamplingParams(temperature=0), 3, [comparison], tokenizer)
    assert "NO" in console.export_text()
    console.file.close()


def test_accepted_tokens_are_marked_and_split_characters_come_out_whole(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the 👍"), 2]
    answer = CompletionOutput(token_ids=ids, drafted=[True, *[False] * (len(ids) - 1)])
    shown = pieces(answer, tokenizer)
    assert "".join(piece for piece, _ in shown) == "the 👍"
    assert shown[0] == (tokenizer.token_text(ids[0]), True)
    assert all(not drafted for _, drafted in shown[1:])


def test_the_prompts_are_of_the_promised_kinds() -> None:
    assert {prompt.kind for prompt in DEMO_PROMPTS} == {"code edit", "summary", "chat", "extraction"}


def _run(model: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    repeated = DemoPrompt("code edit", "the draft the draft")
    monkeypatch.setattr(module, "DEMO_PROMPTS", (repeated, DemoPrompt("chat", "Hi")))
    with pytest.raises(SystemExit) as ended:
        main(["demo", str(model), "--max-tokens", "24", "--kv-cache-memory", "8MiB", *arguments])
    return int(ended.value.code or 0)


def test_the_demo_runs_from_end_to_end(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert _run(tiny_model, [], monkeypatch) == 0
    out = capsys.readouterr().out
    assert "identical with and without speculation" in out
    assert "code edit" in out
    assert "accept." in out
    assert "…" not in out.split("Token ids")[0].replace(str(tiny_model), "")


@pytest.mark.parametrize("options", [[], ["--temperature", "1", "--seed", "3"]], ids=["greedy", "seeded"])
def test_the_demo_as_json(
    options: list[str], tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(tiny_model, ["--json", "--spec-method", "ngram", "--spec-tokens", "3", *options], monkeypatch) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["speculative_config"]["num_speculative_tokens"] == 3
    assert [row["identical"] for row in report["prompts"]] == [True, True]
    assert all(len(row["plain_tokens_per_s"]) == 3 for row in report["prompts"])


def test_the_demo_fails_where_a_token_differs(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = module.compare

    def tampered(*arguments: Any) -> Comparison:
        comparison = compare(*arguments)
        comparison.drafted[1].token_ids[-1] ^= 1
        return comparison

    monkeypatch.setattr(module, "compare", tampered)
    assert _run(tiny_model, [], monkeypatch) == 1
