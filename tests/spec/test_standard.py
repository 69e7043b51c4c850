"""The rule `standard`: the law of what is emitted is the target's, for drafts drawn from any q; exactly, then drawn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.request import FinishReason, SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import draw, processed_logprobs
from forerun.sampling.noise import Stream
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.registry import VERIFIERS
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.standard import StandardVerifier
from tests.spec.outcomes import MOST, Text, V, all_drafts, assert_law, chi_square, distributions, judged, texts


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 2), data=st.data())
def test_law_of_the_emitted_tokens_is_the_targets(length: int, data: st.DataObject) -> None:
    """Sum over every draft, every acceptance and every draw. Both p and q depend on the tokens before, as they do."""
    target = {text: data.draw(distributions) for text in texts(length)}
    proposal = {text: data.draw(distributions) for text in target if len(text) < length}
    emitted: dict[Text, float] = {}
    for drafted, drawn in all_drafts(proposal, length):
        for probability, verdict in judged(StandardVerifier, target, proposal, drafted):
            tokens = tuple(verdict.token_ids)
            assert list(tokens[:-1]) == [drafted[node] for node in verdict.accepted]
            emitted[tokens] = emitted.get(tokens, 0.0) + drawn * probability
    assert_law(emitted, target)


@settings(max_examples=60, deadline=None)
@given(target=distributions, proposal=distributions)
def test_rate_of_acceptance_is_one_minus_the_total_variation(target: list[float], proposal: list[float]) -> None:
    after = {(): target} | {(x,): [1 / V] * V for x in range(V)}
    rate = 0.0
    for drafted, drawn in all_drafts({(): proposal}, 1):
        outcomes = judged(StandardVerifier, after, {(): proposal}, drafted)
        rate += drawn * sum(probability for probability, verdict in outcomes if verdict.accepted)
    assert rate == pytest.approx(sum(map(min, target, proposal)), abs=1e-9)


def random_logits(rows: int, vocab: int, seed: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


GREEDY, DRAWN = SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=0.8, top_p=0.9, logprobs=2)
PROBS = torch.full((3, 5), 0.2)
IMPOSSIBLE = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]] * 3)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("params", "draft"),
    [
        (GREEDY, RequestDraft([1, 2, 3], "t", probs=PROBS)),
        (DRAWN, RequestDraft([1, 2, 3], "t")),
        (DRAWN, RequestDraft([1, 2, 3], "t", parents=[-1, -1, 0], probs=PROBS)),
        (DRAWN, RequestDraft([2, 3, 4], "t", probs=IMPOSSIBLE)),
        (DRAWN, RequestDraft([2, 3, 4], "t", probs=PROBS * math.nan)),
        (DRAWN, RequestDraft([], "t")),
    ],
    ids=["greedy", "one-hot", "tree", "q is zero", "q is no number", "empty"],
)
def test_all_else_is_match_to_the_last_bit(params: SamplingParams, draft: RequestDraft, seed: int) -> None:
    logits = random_logits(len(draft) + 1, 5, seed)
    rows = SamplingRows("r", params, seed, 0, 0, len(draft) + 1, seed)
    both = [rule.verify(Draft({"r": draft}), logits, [rows]) for rule in (StandardVerifier(), MatchVerifier())]
    assert both[0] == both[1]


def test_a_batch_gives_each_request_its_own_rule_and_verdict() -> None:
    """Greedy, one-hot and probabilistic requests in one step: each as if it were alone."""
    logits = random_logits(9, 5, 1)
    drafts = {name: RequestDraft([1, 2], "t", probs=PROBS[:2] if name != "b" else None) for name in "abc"}
    rows = [
        SamplingRows(name, GREEDY if name == "a" else DRAWN, 5, place, 3 * place, 3, 7)
        for place, name in enumerate("abc")
    ]
    together = StandardVerifier().verify(Draft(drafts), logits, rows)
    for place, row in enumerate(rows):
        own = SamplingRows(row.request_id, row.params, 5, place, 0, 3, 7)
        alone = StandardVerifier().verify(
            Draft({row.request_id: drafts[row.request_id]}), logits[3 * place : 3 * place + 3], [own]
        )
        assert alone.by_request[row.request_id] == together.by_request[row.request_id]


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing() -> None:
    logits = torch.tensor([[2.0, 1.0, -math.inf, -math.inf]] * 3)
    p = processed_logprobs(logits[0], SamplingParams()).exp()
    other = torch.tensor([0.0, 0.0, 0.5, 0.5])
    for seed in range(200):
        rows = SamplingRows("r", SamplingParams(), seed, 0, 0, 3, 0)
        for probs, num_accepted in ((p, 2), (other, 0)):
            tokens = [draw(probs.log(), seed, 0, position, Stream.DRAFT) for position in range(2)]
            draft = RequestDraft(tokens, "t", probs=torch.stack([probs, probs]))
            verdict = StandardVerifier().verify(Draft({"r": draft}), logits, [rows]).by_request["r"]
            assert len(verdict.accepted) == num_accepted
            assert all(token < 2 for token in verdict.token_ids)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_end_the_request_where_they_are(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    p = torch.full((2, 4), 0.25)
    rows = SamplingRows("r", SamplingParams(), 3, 0, 0, 3, 0)
    verdict = StandardVerifier().verify(Draft({"r": RequestDraft([1, 2], "t", probs=p)}), logits, [rows])
    assert verdict.by_request["r"].finish_reason is FinishReason.ERROR
    assert verdict.by_request["r"].token_ids == [1]


def test_it_is_registered_by_its_name() -> None:
    rule = VERIFIERS["standard"]()
    assert (rule.name, rule.lossless) == ("standard", "law")


# -- drawn, with the real noise


class FromTarget(StandardVerifier):
    """Wrong on purpose: after a rejection it draws from the target instead of the residual."""

    def draw_residual(self, probs: Tensor, rows: SamplingRows, position: int) -> int:
        return self.draw_row(torch.tensor([0.5, 0.9, -0.4, -0.2]), rows, position)


def test_drawn_texts_follow_the_targets_law() -> None:
    assert chi_square(StandardVerifier(), 10_000) < MOST


def test_the_same_test_finds_a_wrong_residual() -> None:
    assert chi_square(FromTarget(), 2_500) > MOST
