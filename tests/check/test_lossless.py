"""The self-test passes rules that are right and fails those that are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from forerun.check.equality import REHEARSED
from forerun.check.lossless import Effort, check_lossless
from forerun.check.parameters import PARAMETERS, Parameter
from forerun.check.report import Check, Outcome, Report
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.sampling.processors import LogitsProcessors
from forerun.spec.verifier import Verifier
from tests.check import broken
from tests.methods import METHODS, DraftModels, save_noisy
from tests.tiny_engine import NGRAM

SMALL = Effort(num_prompts=2, num_tokens=12, num_contexts=1, num_draws=100, num_texts=128)
FAULTS = Effort(num_prompts=3, num_tokens=24, num_contexts=3, num_draws=400, num_texts=256)


def named(*names: str) -> list[Parameter]:
    return [parameter for parameter in PARAMETERS if parameter.name in names]


def load(model: Path, spec: dict[str, Any]) -> LLM:
    return LLM(str(model), speculative_config=spec, kv_cache_memory_bytes=32 << 20, device="cpu")


@pytest.fixture(scope="module")
def matching(tiny_model: Path, draft_models: DraftModels) -> LLM:
    return load(tiny_model, METHODS["suffix_then_draft_model"](draft_models))


@pytest.fixture(scope="module")
def drawing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """With a draft that is as near the target as real ones are, so that accepted and rejected both occur."""
    draft = save_noisy(tiny_model, tmp_path_factory.mktemp("drafts") / "near", 0.04)
    keys = {"method": "draft_model", "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}
    return load(tiny_model, keys | {"model": str(draft)})


@pytest.fixture
def parts(matching: LLM, drawing: LLM) -> Iterator[None]:
    """Whatever a test puts into the engines is taken out again."""
    kept = [(llm.engine, llm.engine.verifier, llm.engine.processors) for llm in (matching, drawing)]
    yield
    for engine, verifier, processors in kept:
        engine.verifier, engine.processors = verifier, processors


def test_a_rule_that_keeps_the_path_passes(matching: LLM) -> None:
    report = check_lossless(matching, SMALL)
    assert report.passed, report.failed
    assert (report.rule, report.lossless) == ("match", "path")
    proposers = ["suffix", "draft_model", "all together", REHEARSED]
    assert [row.proposer for row in report.rows if row.check is Check.GREEDY] == proposers
    seeded = [(row.proposer, row.parameter) for row in report.rows if row.check is Check.SEEDED]
    assert seeded == [(proposer, parameter.name) for proposer in proposers for parameter in PARAMETERS]
    rows = [row.parameter for row in report.rows if row.check is Check.ROWS]
    assert rows == [parameter.name for parameter in PARAMETERS if parameter.shapes]
    assert "no false alarms" in " ".join(report.words)
    for row in report.rows:
        if row.check is Check.SEEDED and row.proposer == REHEARSED and row.num_drafted > 20:
            assert 0 < row.num_accepted < row.num_drafted, "accepted and rejected both occur"


def test_a_rule_that_keeps_the_law_passes(drawing: LLM) -> None:
    report = check_lossless(drawing, SMALL)
    assert report.passed, report.failed
    assert (report.rule, report.lossless) == ("standard", "law")
    laws = [row for row in report.rows if row.check is Check.LAW]
    names = [parameter.name for parameter in PARAMETERS if parameter.shapes]
    assert [(row.proposer, row.parameter) for row in laws] == [
        *(("draft_model", name) for name in [*names, "all of these"]),
        *((REHEARSED, name) for name in [*names, "all of these"]),
        ("draft_model", "whole engine"),
    ]
    assert laws[-2].detectable is not None
    assert laws[-2].detectable < min(row.detectable or 1 for row in laws[:-2] if row.proposer == REHEARSED)
    assert all(row.detectable is None or 0 < row.detectable < 1 for row in laws)
    assert sum(row.outcome is Outcome.HOLDS for row in laws) > 8
    assert not any(row.check is Check.SEEDED for row in report.rows)


def failures(report: Report, check: Check) -> list[str]:
    assert not report.passed
    assert report.words[0].startswith("FAILED")
    assert all(row.detail for row in report.failed)
    return [row.parameter for row in report.failed if row.check is check]


@pytest.mark.parametrize("rule", [broken.MatchByRank(), broken.OneNoiseAStep()], ids=lambda rule: type(rule).__name__)
def test_a_broken_rule_loses_the_path(matching: LLM, parts: None, rule: Verifier) -> None:
    matching.engine.verifier = rule
    report = check_lossless(matching, FAULTS, parameters=named("temperature", "n"))
    assert set(failures(report, Check.SEEDED)) == {"temperature", "n"}
    assert "the target's two best there" in report.failed[0].detail


@pytest.mark.parametrize(
    "rule",
    [broken.StandardByRank(), broken.FromTheTarget(), broken.CoinForTheResidual(), broken.CoinForTheStep()],
    ids=lambda rule: type(rule).__name__,
)
def test_a_broken_rule_loses_the_law(drawing: LLM, parts: None, rule: Verifier) -> None:
    drawing.engine.verifier = rule
    report = check_lossless(drawing, FAULTS, parameters=named("top_k"))
    assert "all of these" in failures(report, Check.LAW)
    assert not failures(report, Check.GREEDY)


@pytest.mark.parametrize("parameter", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_that_miss_drafted_tokens_are_found(matching: LLM, drawing: LLM, parts: None, parameter: str) -> None:
    for llm, check in ((matching, Check.ROWS), (drawing, Check.LAW)):
        llm.engine.processors = LogitsProcessors([broken.StalePenalties()])
        report = check_lossless(llm, SMALL, parameters=named(parameter))
        assert parameter in failures(report, check)
    assert "after the same tokens as output" in report.failed[-1].detail


def test_drafts_that_are_not_drawn_as_they_say_are_found(drawing: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest token, as if it had been drawn: only the texts of the whole engine tell."""

    def likeliest(logprobs: Tensor, *_: object) -> int:
        return int(logprobs.argmax())

    monkeypatch.setattr("forerun.spec.proposers.drafting.draw", likeliest)
    report = check_lossless(drawing, FAULTS, parameters=named("temperature"))
    assert failures(report, Check.LAW) == ["whole engine"]


def test_a_row_that_shows_nothing_says_so(tiny_model: Path) -> None:
    """An n-gram so long that it is never found; and a check of nothing else fails as a whole."""
    llm = load(tiny_model, NGRAM | {"prompt_lookup_min": 200, "prompt_lookup_max": 200})
    report = check_lossless(llm, SMALL, parameters=named("top_k"))
    own = [row for row in report.rows if row.proposer == "ngram"]
    assert {row.outcome for row in own} == {Outcome.NOTHING}
    assert {row.detail for row in own} == {"0 tokens drafted: nothing was shown by this row"}
    assert "top_k with ngram" in " ".join(report.words)
    assert report.passed, "drafts made from the answers showed something"


def test_without_speculation_there_is_nothing_to_check(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="decodes without speculation"):
        check_lossless(LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20, device="cpu"))


class Lossy(broken.MatchByRank):
    name = "fly"
    lossless = "no"


def test_a_lossy_rule_fails_unless_it_is_expected(matching: LLM, parts: None) -> None:
    matching.engine.verifier = Lossy()
    report = check_lossless(matching, SMALL)
    assert not report.passed
    assert [row.check for row in report.rows] == [Check.RULE]
    assert "fly changes the text by design" in report.rows[0].detail
    report = check_lossless(matching, FAULTS, parameters=named("temperature"), expect_lossy=True)
    assert report.passed
    assert any(row.outcome is Outcome.DIFFERS for row in report.rows)


def test_a_lossless_rule_is_not_expected_to_be_lossy(matching: LLM) -> None:
    with pytest.raises(ConfigError, match="'match' is not: leave it out"):
        check_lossless(matching, SMALL, expect_lossy=True)
