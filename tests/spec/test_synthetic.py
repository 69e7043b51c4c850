"""The rule `synthetic`: exactly the rates that were asked for, whatever is drafted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.request import SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.rules import acceptance_rates
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.synthetic import SyntheticVerifier
from forerun.testing import ScriptedProposer
from tests.spec.outcomes import V, every_outcome
from tests.tiny_engine import chain, make_engine, prompts, run

DRAWN, GREEDY = SamplingParams(), SamplingParams(temperature=0)
RATES = [(1.0, 0.5, 0.25), (0.75, 0.75, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), acceptance_rates(2.4, 3)]


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("params", [DRAWN, GREEDY], ids=["drawn", "greedy"])
@pytest.mark.parametrize("with_probs", [False, True])
def test_each_prefix_stands_as_often_as_asked(
    rates: tuple[float, ...], params: SamplingParams, with_probs: bool
) -> None:
    """Exactly, over all outcomes; a draft that is shorter than the rates has the first of them."""
    q = torch.full((3, V), 1 / V, dtype=torch.float64)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for length in range(4):
        draft = RequestDraft([2, 0, 1][:length], "t", probs=q[:length] if with_probs else None)
        rows = SamplingRows("r", params, 0, 0, 0, length + 1, 0)
        outcomes = list(every_outcome(lambda: SyntheticVerifier(rates), draft, logits[: length + 1], rows))
        assert sum(p for p, _ in outcomes) == pytest.approx(1.0)
        for place in range(length):
            assert sum(p for p, v in outcomes if len(v.accepted) > place) == pytest.approx(rates[place])
        for _, verdict in outcomes:
            count = len(verdict.accepted)
            assert verdict.token_ids[:-1] == draft.tokens[:count]
            if params.greedy:
                assert verdict.token_ids[-1] == int(logits[count].argmax())
            elif count < length and not with_probs:  # what is left of the target without the drafted token
                assert verdict.token_ids[-1] != draft.tokens[count]


@pytest.mark.parametrize("length", [1.0, 2.5, 3.7, 5.0])
def test_the_measured_length_is_the_one_that_was_asked_for(tiny_model: Path, length: float) -> None:
    """Through the engine, with drafts that are nearly never right. Only one token of a step is left to chance: 5
    standard errors of that."""
    rule = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    engine = make_engine(tiny_model, {"method": "ngram", "num_speculative_tokens": 4} | rule)
    engine.proposer = proposer = ScriptedProposer(lambda request, room: chain([7, 8, 9, 10][:room]))
    engine.scheduler.on_release = proposer.forget
    work = [(p, SamplingParams(temperature=0.8, max_tokens=150, ignore_eos=True)) for p in prompts(8)]
    results = run(engine, work)
    spec = [r.last.metrics.speculative_decoding for r in results if r.last.metrics]
    pairs = [
        (drafted, accepted)
        for figures in spec
        if figures
        for drafted, accepted in zip(figures["per_step_drafted"], figures["per_step_accepted"], strict=True)
        if drafted == 4
    ]
    assert len(pairs) > 200
    measured = 1 + sum(accepted for _, accepted in pairs) / len(pairs)
    share = length % 1
    assert measured == pytest.approx(length, abs=5 * (share * (1 - share) / len(pairs)) ** 0.5 + 1e-9)


def test_trees_are_matched() -> None:
    draft = RequestDraft([1, 2, 0], "t", parents=[-1, -1, 0])
    for seed in range(20):
        logits = torch.randn(4, V, generator=torch.Generator().manual_seed(seed))
        rows = SamplingRows("r", DRAWN, seed, 0, 0, 4, 0)
        both = [r.verify(Draft({"r": draft}), logits, [rows]) for r in (SyntheticVerifier([0.5] * 3), MatchVerifier())]
        assert both[0] == both[1]
