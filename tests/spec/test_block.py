"""The rule `block`: the target's law for any p and q, and as many accepted tokens as the paper's algorithm, exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.request import FinishReason, Request, SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.proposers.drafting import Chooser, Job
from forerun.spec.verifiers.block import BlockVerifier
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.standard import StandardVerifier
from forerun.spec.vocabulary import SameVocabulary
from tests.spec.outcomes import (
    Laws,
    Outcomes,
    Text,
    V,
    all_drafts,
    assert_law,
    distributions,
    judged,
    texts,
)


def drawn_laws(data: st.DataObject, length: int) -> tuple[Laws, Laws]:
    """p after every text of up to `length` tokens, and q after those that are drafted from: now and then the same."""
    target = {text: data.draw(distributions) for text in texts(length)}
    proposal = {t: data.draw(distributions | st.just(target[t])) for t in target if len(t) < length}
    return target, proposal


def papers_outcomes(target: Laws, proposal: Laws, drafted: Text) -> dict[Text, float]:
    """Algorithm 2 of Sun et al. 2024 (arXiv 2403.10444), read plainly: the law of the text for one drafted block.

    It goes through all patterns of which of the independent uniform numbers were small enough.
    """
    p = [np.array(target[drafted[:k]]) for k in range(len(drafted) + 1)]
    q = [np.array(proposal[drafted[:k]]) for k in range(len(drafted))]
    ratio = [1.0]
    for i, x in enumerate(drafted):
        ratio.append(min(1.0, ratio[i] * p[i][x] / q[i][x]))
    h = []
    for i in range(1, len(drafted)):
        s = np.maximum(ratio[i] * p[i] - q[i], 0).sum()
        h.append(s / (s + 1 - ratio[i]) if s + 1 - ratio[i] > 0 else 1.0)
    h.append(ratio[-1])
    law: dict[Text, float] = {}
    for small in itertools.product([False, True], repeat=len(drafted)):
        chance = float(np.prod([t if yes else 1 - t for t, yes in zip(h, small, strict=True)]))
        tau = max((i + 1 for i, yes in enumerate(small) if yes), default=0)
        if chance < 1e-12:  # rounding where p and q are equal: nothing to draw from then
            continue
        rest = p[tau] if tau == len(drafted) else np.maximum(ratio[tau] * p[tau] - q[tau], 0)
        for y in range(V):
            text = (*drafted[:tau], y)
            law[text] = law.get(text, 0.0) + chance * float(rest[y] / rest.sum())
    return law


def law_of(outcomes: Outcomes) -> dict[Text, float]:
    law: dict[Text, float] = {}
    for probability, verdict in outcomes:
        text = tuple(verdict.token_ids)
        law[text] = law.get(text, 0.0) + probability
    return law


def expected_length(rule: type[MatchVerifier], target: Laws, proposal: Laws, length: int) -> float:
    return sum(
        drawn * probability * len(verdict.accepted)
        for drafted, drawn in all_drafts(proposal, length)
        for probability, verdict in judged(rule, target, proposal, drafted)
    )


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 3), data=st.data())
def test_law_of_the_emitted_tokens_is_the_targets_and_the_papers(length: int, data: st.DataObject) -> None:
    """Sum over every draft, every coin and every draw: whole outputs."""
    target, proposal = drawn_laws(data, length)
    emitted: dict[Text, float] = {}
    for drafted, drawn in all_drafts(proposal, length):
        law = law_of(judged(BlockVerifier, target, proposal, drafted))
        papers = papers_outcomes(target, proposal, drafted)
        for text in law | papers:
            assert law.get(text, 0.0) == pytest.approx(papers.get(text, 0.0), abs=1e-9)
        for text, probability in law.items():
            emitted[text] = emitted.get(text, 0.0) + drawn * probability
    assert_law(emitted, target)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 3), data=st.data())
def test_never_fewer_accepted_tokens_than_standard(length: int, data: st.DataObject) -> None:
    """Expectations over every draft and every outcome; equal for blocks of one token, where the rules are the same."""
    target, proposal = drawn_laws(data, length)
    block, standard = (expected_length(rule, target, proposal, length) for rule in (BlockVerifier, StandardVerifier))
    assert block >= standard - 1e-9
    if length == 1:
        assert block == pytest.approx(standard, abs=1e-9)


def test_the_papers_example_accepts_more() -> None:
    """Section 1 of the paper: p = (1/3, 2/3), q = (2/3, 1/3) whatever stands before; 11/9 tokens of two, not 10/9."""
    target = {text: [1 / 3, 2 / 3, 0.0] for text in texts(2)}
    proposal = {text: [2 / 3, 1 / 3, 0.0] for text in texts(1)}
    assert expected_length(StandardVerifier, target, proposal, 2) == pytest.approx(10 / 9)
    assert expected_length(BlockVerifier, target, proposal, 2) == pytest.approx(11 / 9)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 3), data=st.data())
def test_for_one_hot_drafts_match_has_the_law_of_block_verification(length: int, data: st.DataObject) -> None:
    """What stands and what follows it: `match` is not only as good there, it is the same law."""
    target = {text: data.draw(distributions) for text in texts(length)}
    drafted = tuple(data.draw(st.lists(st.integers(0, V - 1), min_size=length, max_size=length)))
    one_hot = {drafted[:k]: [float(x == drafted[k]) for x in range(V)] for k in range(length)}
    law, papers = law_of(judged(MatchVerifier, target, one_hot, drafted)), papers_outcomes(target, one_hot, drafted)
    for text in law | papers:
        assert law.get(text, 0.0) == pytest.approx(papers.get(text, 0.0), abs=1e-9)


GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.9)
PROBS = torch.full((3, 5), 0.2)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("params", "draft"),
    [
        (GREEDY, RequestDraft([1, 2, 3], "t", probs=PROBS)),
        (DRAWN, RequestDraft([1, 2, 3], "t")),
        (DRAWN, RequestDraft([1, 2, 3], "t", parents=[-1, -1, 0], probs=PROBS)),
        (DRAWN, RequestDraft([2, 3, 4], "t", probs=PROBS * torch.nan)),
        (DRAWN, RequestDraft([], "t")),
    ],
    ids=["greedy", "one-hot", "tree", "q is no number", "empty"],
)
def test_all_else_is_match_to_the_last_bit(params: SamplingParams, draft: RequestDraft, seed: int) -> None:
    logits = torch.randn(len(draft) + 1, 5, generator=torch.Generator().manual_seed(seed))
    rows = SamplingRows("r", params, seed, 0, 0, len(draft) + 1, seed)
    both = [rule.verify(Draft({"r": draft}), logits, [rows]) for rule in (BlockVerifier(), MatchVerifier())]
    assert both[0] == both[1]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), second=st.integers(0, V - 1))
def test_a_block_ends_before_a_token_that_cannot_have_been_drawn(data: st.DataObject, second: int) -> None:
    """What stands before it is judged as a block of its own."""
    target, proposal = drawn_laws(data, 2)
    for drafted, _ in all_drafts(proposal, 1):
        impossible = {drafted: [0.0 if x == second else 0.5 for x in range(V)]}
        law = law_of(judged(BlockVerifier, target, {(): proposal[()]} | impossible, (*drafted, second)))
        alone = law_of(judged(BlockVerifier, target, proposal, drafted))
        for text in law | alone:
            assert law.get(text, 0.0) == pytest.approx(alone.get(text, 0.0), abs=1e-9)


def test_numbers_that_are_not_finite_end_the_request_where_they_are() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    p = torch.full((2, 4), 0.25)
    rows = SamplingRows("r", SamplingParams(), 3, 0, 0, 3, 0)
    verdict = BlockVerifier().verify(Draft({"r": RequestDraft([1, 2], "t", probs=p)}), logits, [rows])
    assert verdict.by_request["r"].finish_reason is FinishReason.ERROR
    assert verdict.by_request["r"].token_ids == [1]


def test_noise_that_an_earlier_draft_used_would_break_the_law() -> None:
    """The verdict depends on the tokens beyond what it accepts, so the next draft must not be the same draw again.

    Exactly, in the paper's example: after the first token was rejected, the second position is drafted anew.
    """
    p, q = [1 / 3, 2 / 3, 0.0], [2 / 3, 1 / 3, 0.0]
    target, proposal = dict.fromkeys(texts(2), p), dict.fromkeys(texts(1), q)
    second = {"fresh": 0.0, "again": 0.0}  # chance that token 0 is the second one, where the draft fell at once
    fell = 0.0
    for drafted, drawn in all_drafts(proposal, 2):
        chance = drawn * sum(
            c for c, verdict in judged(BlockVerifier, target, proposal, drafted) if not verdict.accepted
        )
        fell += chance
        for way, tokens in (("fresh", {0: 2 / 3, 1: 1 / 3}), ("again", {drafted[1]: 1.0})):
            for x, share in tokens.items():
                law = judged(BlockVerifier, target, proposal, (x,))
                second[way] += chance * share * sum(c for c, verdict in law if verdict.token_ids[0] == 0)
    assert second["fresh"] / fell == pytest.approx(1 / 3)
    assert abs(second["again"] / fell - 1 / 3) > 0.05


class Watched(BlockVerifier):
    """Keeps where every coin fell; all of them say no, so that all are thrown."""

    def __init__(self) -> None:
        self.coins: list[int] = []

    def accepts(self, probability: float, rows: SamplingRows, position: int) -> bool:
        self.coins.append(
            next(n for n in range(1 << 16) if super(Watched, self).accepts(n / (1 << 16), rows, position))
        )
        return False


def test_neither_coins_nor_drafts_come_again_when_a_later_draft_reaches_their_position() -> None:
    rule, drafted = Watched(), set()
    for root in range(4):
        request = Request("r", [1] * (1 + root), 1, SamplingParams(), 3)
        job = Job(request, 5 - root)
        chooser = Chooser(SameVocabulary(1000, 1000), 1000, "probabilistic")
        while len(job.tokens) < job.length:
            chooser.choose([job], torch.zeros(1, 1000))
        drafted.add(job.tokens[-1])  # for output position 4, from every root
        rows = SamplingRows("r", SamplingParams(), 3, 0, 0, job.length + 1, root)
        rule.verify(Draft({"r": job.result("t")}), torch.zeros(job.length + 1, 1000), [rows])
    assert len(drafted) == 4
    assert len(set(rule.coins)) == len(rule.coins) == 5 + 4 + 3 + 2
