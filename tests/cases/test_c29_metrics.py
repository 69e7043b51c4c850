"""C29: the figures add up, with a draft that is the target, with one that is not, and without any."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.request import SamplingParams
from tests.cases.conftest import MakeEngine
from tests.cases.material import DISTINCT
from tests.methods import METHODS, PERFECT, DraftModels
from tests.tiny_engine import run

WORK = [(DISTINCT[0], SamplingParams(temperature=0, max_tokens=41, ignore_eos=True))]


def test_a_perfect_draft_has_the_expected_figures(engines: MakeEngine, draft_models: DraftModels) -> None:
    """1 token from the prompt's pass, then 8 steps of 5: 32 drafted, 32 accepted, 8 at each of 4 positions."""
    engine = engines(None, spec=PERFECT["draft_model"](draft_models))
    run(engine, WORK)
    spec = engine.stats().spec
    assert (spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens) == (8, 32, 32)
    assert spec.num_accepted_tokens_per_pos == [8, 8, 8, 8]


@pytest.mark.parametrize("method", METHODS)
def test_figures_add_up(engines: MakeEngine, draft_models: DraftModels, method: str) -> None:
    engine = engines(None, spec=METHODS[method](draft_models))
    work = [(prompt, SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)) for prompt in DISTINCT]
    results = run(engine, work)
    spec = engine.stats().spec
    assert 0 <= spec.num_accepted_tokens <= spec.num_draft_tokens
    assert sum(spec.num_accepted_tokens_per_pos) == spec.num_accepted_tokens
    assert sorted(spec.num_accepted_tokens_per_pos, reverse=True) == spec.num_accepted_tokens_per_pos
    totals = [0, 0, 0]
    for name in engine.stats().spec_by_proposer.values():
        totals = [
            a + b
            for a, b in zip(totals, (name.num_drafts, name.num_draft_tokens, name.num_accepted_tokens), strict=True)
        ]
    assert totals == [spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens]
    for result in results:
        found = result.last.metrics.speculative_decoding
        plain_steps = 41 - 1 - found["num_accepted_draft_tokens"] - found["num_spec_steps"]
        assert plain_steps >= 0, "tokens are those of the prompt's pass, accepted ones, and one a step"
        if found["num_spec_steps"]:
            mean = 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
            assert found["mean_acceptance_length"] == pytest.approx(mean)
        assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]


def test_a_plain_engine_counts_no_drafts(engines: MakeEngine) -> None:
    engine = engines(None)
    run(engine, WORK)
    before: Any = engine.stats().spec
    assert (before.num_drafts, before.num_draft_tokens, before.num_accepted_tokens) == (0, 0, 0)
