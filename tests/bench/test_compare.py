"""Comparisons: windows, their order, ratios by category, and the words of the verdict."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from forerun.bench.client import Outcome, Target
from forerun.bench.compare import (
    ALL_PROMPTS,
    Arm,
    CompareJob,
    Finding,
    Level,
    as_object,
    findings,
    measure,
    same_texts,
    split,
    verdict,
)
from forerun.bench.compare_report import show_comparison, write_comparison
from forerun.bench.datasets import Sample
from forerun.bench.load import Run
from forerun.bench.stats import METHOD, Ratio
from forerun.errors import ConfigError
from forerun.spec.stats import SpecTotals
from tests.server.fake_engine import fake_factory
from tests.server.live import LiveServer

ARMS = (Arm("plain"), Arm("A suffix K=4", '{"method": "suffix"}'))
SAMPLES = [Sample(f"{category} {number}", 27, category) for category in ("qa", "rag") for number in range(6)]
TARGET = Target(base_url="", endpoint="/v1/chat/completions", backend="openai-chat", model="fake")


def job(levels: Sequence[int] = (1,), num_windows: int = 3) -> CompareJob:
    return CompareJob(
        model="fake", arms=ARMS, levels=levels, windows=split(SAMPLES, num_windows, 0), target=TARGET, num_warmups=1
    )


def test_each_window_has_prompts_of_its_own_in_the_same_shares() -> None:
    windows = split(SAMPLES, 3, 0)
    assert sorted(s.prompt for window in windows for s in window) == sorted(s.prompt for s in SAMPLES)
    assert [Counter(s.category for s in window) for window in windows] == [{"qa": 2, "rag": 2}] * 3
    assert split(SAMPLES, 3, 0) == windows


def test_a_comparison_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="--windows must be at least 2, got 1"):
        split(SAMPLES, 1, 0)
    with pytest.raises(ConfigError, match="12 prompts do not fill 13 windows"):
        split(SAMPLES, 13, 0)
    with pytest.raises(ConfigError, match="4 prompts, which are never 16 at once: give --num-prompts of at least 48"):
        job(levels=(1, 16))


def answer(category: str, latency_s: float, tokens: int = 10, text: str = "x", drafts: int | None = None) -> Outcome:
    spec = {"num_spec_steps": drafts, "num_draft_tokens": drafts, "num_accepted_draft_tokens": drafts}
    return Outcome(
        Sample("", None, category), latency_s=latency_s, num_output_tokens=tokens, text=text, ended=True,
        metrics={} if drafts is None else {"speculative_decoding": spec},
    )  # fmt: skip


def level() -> Level:
    """Plain takes 1 s for qa and 2 s for rag; A takes half of it on qa and twice on rag."""
    plain = [Run([answer("qa", 1.0), answer("rag", 2.0)], 3.0) for _ in range(3)]
    drafted = [Run([answer("qa", 0.5, drafts=3), answer("rag", 4.0, text="y", drafts=0)], 4.5) for _ in range(3)]
    return Level(2, {"plain": plain, ARMS[1].name: drafted})


def test_ratios_are_of_the_wall_clock_and_by_category_of_the_requests_own_time() -> None:
    found = {finding.category: finding for finding in findings([level()])}
    ratios = {category: finding.ratio.value for category, finding in found.items() if finding.ratio}
    assert ratios == pytest.approx({ALL_PROMPTS: 3 / 4.5, "qa": 2.0, "rag": 0.5})
    assert (found[ALL_PROMPTS].plain_rate, found["qa"].rate) == (pytest.approx(20 / 3), 20)
    assert found["qa"].spec == SpecTotals(9, 9, 9)
    assert same_texts([level()], ARMS[1].name) == (3, 6)


def test_a_window_that_was_interrupted_is_in_no_ratio() -> None:
    cut = level()
    cut.runs[ARMS[1].name][2].interrupted = True
    assert cut.num_windows == 2
    assert all(finding.ratio and finding.ratio.num_windows == 2 for finding in findings([cut]))


def test_an_arm_that_answered_nothing_has_no_ratio() -> None:
    broken = level()
    for run in broken.runs[ARMS[1].name]:
        for outcome in run.outcomes:
            outcome.error = "HTTP 500: no"
    found = findings([broken])
    assert all(finding.ratio is None for finding in found)
    assert verdict(found)[0].endswith("nothing was measured to compare.")


def finding(category: str, ratio: Ratio | None, drafts: int = 5, concurrency: int = 1) -> Finding:
    return Finding("A", concurrency, category, ratio, 10, 10, SpecTotals(drafts, drafts, 0))


@pytest.mark.parametrize(
    ("ratio", "drafts", "words"),
    [
        (Ratio(1.4, 1.2, 1.6, 5), 5, "it helps: 1.40 times plain's tokens per second (1.20 to 1.60, 5 windows)."),
        (Ratio(0.8, 0.7, 0.9, 5), 5, "it does not help, it costs: 0.80 times"),
        (Ratio(1.05, 0.95, 1.16, 5), 5, "the interval does not let one say whether it helps: 1.05 times"),
        (Ratio(1.4, None, None, 1), 5, "one window gives no interval"),
        (Ratio(1.0, 0.99, 1.01, 5), 0, "nothing was drafted, so nothing is gained"),
        (None, 5, "nothing was measured to compare."),
    ],
)
def test_the_verdict_says_in_words_what_the_interval_says(ratio: Ratio | None, drafts: int, words: str) -> None:
    (line, *_) = verdict([finding(ALL_PROMPTS, ratio, drafts)])
    assert line.startswith("A, one request at a time: ")
    assert words in line


def test_the_verdict_names_the_categories_where_it_helps_costs_and_where_one_cannot_say() -> None:
    parts = [
        finding("rag", Ratio(2.0, 1.5, 2.5, 5)),
        finding("summarization", Ratio(1.5, 1.1, 2.0, 5)),
        finding("translation", Ratio(0.7, 0.6, 0.8, 5)),
        finding("qa", Ratio(1.0, 0.9, 1.1, 5)),
        finding("math", None),
    ]
    other = finding(ALL_PROMPTS, Ratio(0.9, 0.85, 0.95, 5), concurrency=16)
    assert verdict([finding(ALL_PROMPTS, Ratio(1.3, 1.1, 1.5, 5)), *parts, other])[1:] == [
        "  helps on rag (1.50 to 2.50), summarization (1.10 to 2.00)",
        "  costs on translation (0.60 to 0.80)",
        "  the interval does not let one say on qa (0.90 to 1.10)",
        "  not measured on math",
        "A, 16 requests at once: it does not help, it costs: 0.90 times plain's tokens per second (0.85 to 0.95, 5 "
        "windows).",
        f"{METHOD}. Of 6 such intervals about 0.3 miss the truth by chance.",
    ]


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """Plain: a letter a step. A: nine letters a step, which takes as long."""
    plain = LiveServer(factory=fake_factory(step_s=0.004, burst=1, speculation=False))
    with plain, LiveServer(factory=fake_factory(step_s=0.004, burst=9)) as drafted:
        yield {"plain": plain.url, ARMS[1].name: drafted.url}


def test_a_server_that_emits_nine_tokens_a_step_is_found_to_help(urls: dict[str, str]) -> None:
    told: list[str] = []
    levels = asyncio.run(measure(job(levels=(1, 2), num_windows=4), urls, tell=told.append))
    assert told[:4] == [
        f"1 at once, window {number} of 4: {arm}" for number in (1, 2) for arm in ("plain", ARMS[1].name)
    ]
    found = findings(levels)
    assert [f.category for f in found] == [ALL_PROMPTS, "qa", "rag"] * 2
    assert all(f.ratio is not None and f.ratio.says == 1 for f in found if f.category == ALL_PROMPTS)
    assert same_texts(levels, ARMS[1].name) == (24, 24)
    result = as_object(job(levels=(1, 2), num_windows=4), levels, found)
    assert result["verdict"][0].startswith("A suffix K=4, one request at a time: it helps: ")
    assert not result["interrupted"]
    assert len(result["levels"][0]["output_throughput"]["plain"]) == 4


def test_servers_that_refuse_every_request_are_one_line(urls: dict[str, str]) -> None:
    broken = CompareJob(
        model="m", arms=ARMS, levels=(1,), windows=split(SAMPLES, 2, 0),
        target=Target(base_url="", endpoint=TARGET.endpoint, backend=TARGET.backend, model="other"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="plain answered no warm-up request: HTTP 404"):
        asyncio.run(measure(broken, urls))


def test_the_report_holds_the_verdict_and_escapes_what_users_named(tmp_path: Path) -> None:
    named = replace(job(), model="<m>")
    console = Console(file=io.StringIO(), width=120)
    show_comparison(console, named, [level()], findings([level()]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "it does not help, it costs" in text
    assert "3 of 6 answers are plain's" in text
    page = tmp_path / "page.html"
    write_comparison(page, named, [level()], findings([level()]))
    body = page.read_text().rpartition("</script></head>")[2]
    assert "Speculation on &lt;m&gt;" in body
    assert "<m>" not in body
    assert "it does not help, it costs" in body
