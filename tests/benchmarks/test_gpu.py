"""`benchmarks/gpu.py`: its arithmetic, and all of it but graphs on a CPU with a tiny model."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gpu
import pytest
from gpu_parts.checks import read_flips
from gpu_parts.children import results
from gpu_parts.floors import Sizes, Speeds, step_floor
from gpu_parts.options import SETTLE, Options
from gpu_parts.report import Column, Report, Table, met, number, target_ms, with_spread, yes_or_missed
from gpu_parts.steps import SILENT_STEPS, Batch, Moment, Timing, step_ms, windows

OPTIONS = Options(batch=(1,), prompt=20, steps=4, rounds=1, shapes="tiny", layers=0, device="cpu")
TINY = ["--device", "cpu", "--shapes", "tiny", "--prompt", "20", "--rounds", "1"]


def moments(*tokens: int, ms: float = 10.0) -> list[Moment]:
    """Outputs every `ms` milliseconds that bring so many tokens each, after a first."""
    return [Moment(i * ms / 1000, sum(tokens[:i])) for i in range(len(tokens) + 1)]


def test_a_window_is_time_over_the_tokens_that_came_in_it() -> None:
    assert windows(moments(*[2] * 33), batch=2, tokens=16) == pytest.approx([10.0, 10.0])
    # 8 tokens a request in a step: windows of two steps, whatever is left over is not counted
    assert windows(moments(16, 16, 16, 16, 16), batch=2, tokens=16) == pytest.approx([1.25, 1.25])
    # unequal steps: the window ends with the step that fills it
    assert windows(moments(3, 4, 1, 5), batch=1, tokens=6) == pytest.approx([20 / 7, 20 / 6])


def test_too_few_tokens_for_a_window_are_one() -> None:
    assert windows(moments(2, 2, 2), batch=2, tokens=16) == pytest.approx([10.0])


def test_a_timing_takes_all_rounds() -> None:
    first = [Moment(moment.at_s, moment.num_tokens + 20) for moment in moments(4, 4, ms=10)]
    timing = Timing.of([first, moments(2, 2, ms=20)], batch=2, prompt=100)
    assert timing.ms == {"median": 12.5, "low": 5.0, "high": 20.0}
    assert timing.step_ms == pytest.approx(15.0)
    assert timing.tokens_per_s == pytest.approx(12 / 0.06)
    assert timing.tokens_a_step == pytest.approx(12 / 4 / 2)
    assert timing.context == pytest.approx((112 + 101) / 2)
    assert step_ms(first) == pytest.approx(10.0)


class OneBehind:
    """Gives each request a token a step, one call late: the first brings nothing, and the last comes after an abort."""

    def __init__(self, silent: bool = False) -> None:
        self.waiting: list[str] = []
        self.under_way: dict[str, int] = {}
        self.silent = silent
        self.calls = 0

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        assert len(prompt) == 5
        assert all(0 <= token < 50 for token in prompt)
        self.waiting.append(request_id)

    def step(self) -> Mapping[str, int]:
        self.calls += 1
        out, self.under_way = self.under_way, {} if self.silent else dict.fromkeys(self.waiting, 1)
        return out

    def abort(self, request_ids: Sequence[str]) -> None:
        self.waiting = [request_id for request_id in self.waiting if request_id not in request_ids]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.under_way)


def test_a_batch_is_watched_from_output_to_output() -> None:
    server = OneBehind()
    for _ in range(2):
        with Batch(server, 3, prompt=5, vocab_size=50, max_tokens=100) as batch:
            assert batch.num_tokens == 3
            seen = batch.watch(6)
        assert len(seen) == 7
        assert seen[0].num_tokens == 3 * (2 + SETTLE)
        assert [b.num_tokens - a.num_tokens for a, b in itertools.pairwise(seen)] == [3] * 6
        assert not server.has_work


def test_an_engine_that_hangs_is_an_error() -> None:
    server = OneBehind(silent=True)
    with pytest.raises(RuntimeError, match=f"no token in {SILENT_STEPS} steps"):
        Batch(server, 1, prompt=5, vocab_size=50, max_tokens=100).__enter__()


SIZES = Sizes(element_bytes=2, weights=1000, kv_bytes=10, head_input_weights=100, head_weights=50, head_kv_bytes=1)


def test_a_floor_is_bytes_or_products_and_then_attention() -> None:
    speeds = Speeds(bytes=1000.0, flops=100_000.0)
    few = step_floor(SIZES, speeds, batch=4, context=25, rows=1)
    assert few == (pytest.approx(2000.0), pytest.approx(1000.0))
    assert few.total == pytest.approx(3000.0)
    many = step_floor(SIZES, speeds, batch=200, context=25, rows=4)
    assert many.products == pytest.approx(1000 * 2 * 1000 * 800 / 100_000)
    eagle = step_floor(SIZES, speeds, batch=4, context=25, rows=4, head_passes=3)
    assert eagle.products == pytest.approx(2000 + 200 + 3 * 100)
    assert eagle.attention == pytest.approx(1000 + 3 * 100)


def test_targets_are_ours_and_else_the_peers() -> None:
    assert [target_ms("plain", batch) for batch in (1, 4, 256, 3)] == [5.1, 5.29, 18.5, None]
    assert [target_ms("eagle3", batch) for batch in (1, 64)] == [2.6, 5.27]
    assert (met(5.1, 5.1), met(5.11, 5.1), met(1.0, None)) == (True, False, None)
    assert (yes_or_missed(True), yes_or_missed(False)) == ("yes", "MISSED")


COLUMNS = [
    Column("batch", "batch"),
    Column("ms", "ms a token", with_spread),
    Column("rate", "tokens/s", number(0)),
    Column("met", "met", yes_or_missed),
]


def test_a_row_is_shown_when_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("Title", COLUMNS)
    table.add(batch=64, ms={"median": 7.494, "low": 7.4, "high": 12.345}, rate=8542.3, met=None)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "Title"
    assert shown[2].split() == ["batch", "ms", "a", "token", "tokens/s", "met"]
    assert shown[3].split() == ["64", "7.49", "(7.40-12.35)", "8,542", "-"]
    assert len(shown[2]) == len(shown[3])
    assert table.markdown().splitlines() == [
        "Title",
        "",
        "| batch | ms a token | tokens/s | met |",
        "| --- | --- | --- | --- |",
        "| 64 | 7.49 (7.40-12.35) | 8,542 | - |",
    ]


def test_a_run_that_is_cut_leaves_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({"device": "x"}, tmp_path / "r.json", tmp_path / "r.md")
    table = report.table("part", "Title", COLUMNS)
    table.add(batch=1, met=False)
    table.note("a note")
    report.fail("other: broke")
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["parts"]["part"] == {"rows": [{"batch": 1, "met": False}], "notes": ["a note"]}
    assert found["failures"] == ["other: broke"]
    assert (tmp_path / "r.md").read_text().endswith("| 1 | - | - | MISSED |\n\n- a note\n")
    report.end()
    assert "targets missed: 1; failed: 1" in capsys.readouterr().out


def test_flips_are_read_from_the_tests_output() -> None:
    lines = [
        "ngram: 0 flips in 100 tokens",
        "ngram bf16: 0 flips in 900 tokens",
        "eagle: 1 flips in 1000 tokens",
        "flip, eagle: request 3, token 7: gap 1.00e-04",
        "4 passed in 2.00s",
    ]
    assert read_flips(lines) == (1, 2000, [lines[1], lines[2], lines[3]])


def test_the_parts_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tables = tmp_path / "out.json", tmp_path / "out.md"
    files = ["--json", str(out), "--markdown", str(tables)]
    words = ["--batch", "2", "1", "--steps", "4", "--parts", "plain", "verify", "pass", "eagle3"]
    assert gpu.main([*TINY, *words, *files]) == 0, capsys.readouterr().out
    found = json.loads(out.read_text())["parts"]
    assert [row["batch"] for row in found["plain"]["rows"]] == [1, 2]
    assert all(row["tokens_a_step"] == 1 and row["ms"]["low"] > 0 for row in found["plain"]["rows"])
    assert [row["rows"] for row in found["verify"]["rows"]] == [4, 8]  # each wrong draft was verified
    assert [(row["batch"], row["rows"]) for row in found["pass"]["rows"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert all(1 <= row["acceptance_length"] <= 4 for row in found["eagle3"]["rows"])
    assert all(row["met"] is None for part in ("plain", "verify", "eagle3") for row in found[part]["rows"])
    assert "| batch | ms a token |" in tables.read_text()


def test_a_part_that_fails_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(gpu.Timings, "verify", broken)
    words = ["--batch", "1", "--steps", "2", "--parts", "verify", "pass"]
    assert gpu.main([*TINY, *words, "--json", str(tmp_path / "out.json")]) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["failures"] == ["verify (scripted): RuntimeError: no more"]
    assert found["parts"]["pass"]["rows"]
    assert "FAILED: verify (scripted): RuntimeError: no more" in capsys.readouterr().out


def test_start_up_is_that_of_a_process_of_its_own(tmp_path: Path) -> None:
    (result,) = results("startup-plain", OPTIONS, tmp_path, timeout_s=200)
    assert 0 < result.values["build_s"] + result.values["answer_s"] < result.after_s


def test_a_child_that_fails_is_one_line(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, shapes="none")
    with pytest.raises(RuntimeError, match=r"startup-plain: exit status 1 after \d+ s: KeyError: 'none'"):
        list(results("startup-plain", options, tmp_path, timeout_s=200))


@pytest.mark.parametrize("words", ["--batch 0", "--steps 0", "--parts nothing", "--shapes huge"])
def test_bad_settings_are_refused_by_name(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--device", "cpu", *words.split()])
    assert words.split()[0] in capsys.readouterr().err
