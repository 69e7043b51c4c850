"""The rule `standard`: the law of what is emitted is the target's, for drafts drawn from any q; exactly, then drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

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
from forerun.spec.verifier import RequestVerdict
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.standard import StandardVerifier

V = 3


class Outcomes(StandardVerifier):
    """The real rule, with every random decision taken from a list; each unlisted one goes to its first outcome."""

    def __init__(self, decisions: list[int]) -> None:
        self.decisions = decisions
        self.weights: list[list[float]] = []  # of the outcomes of each decision that was met

    def choose(self, weights: list[float]) -> int:
        place = len(self.weights)
        self.weights.append(weights)
        if place == len(self.decisions):
            self.decisions.append(0)
        return self.decisions[place]

    def accepts(self, probability: float, rows: SamplingRows, position: int) -> bool:
        return self.choose([1 - probability, probability]) == 1

    def draw_row(self, logits: Tensor, rows: SamplingRows, position: int) -> int:
        return self.choose(processed_logprobs(logits, rows.params).exp().tolist())

    def draw_residual(self, probs: Tensor, rows: SamplingRows, position: int) -> int:
        return self.choose(probs.tolist())


def every_outcome(draft: RequestDraft, logits: Tensor, rows: SamplingRows) -> Iterator[tuple[float, RequestVerdict]]:
    """Each way the decisions can go, with its probability."""
    decisions: list[int] = []
    while True:
        rule = Outcomes(decisions)
        verdict = rule.verify(Draft({"r": draft}), logits, [rows]).by_request["r"]
        del decisions[len(rule.weights) :]
        yield math.prod(w[d] for w, d in zip(rule.weights, decisions, strict=True)), verdict
        while decisions and decisions[-1] + 1 == len(rule.weights[len(decisions) - 1]):
            decisions.pop()
        if not decisions:
            return
        decisions[-1] += 1


weights = st.one_of(st.just(0.0), st.floats(0.01, 1))
distributions = st.lists(weights, min_size=V, max_size=V).filter(any).map(lambda w: [x / sum(w) for x in w])


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 2), data=st.data())
def test_law_of_the_emitted_tokens_is_the_targets(length: int, data: st.DataObject) -> None:
    """Sum over every draft, every acceptance and every draw. Both p and q depend on the tokens before, as they do."""
    paths = [p for n in range(length + 1) for p in itertools.product(range(V), repeat=n)]
    target = {path: data.draw(distributions) for path in paths}
    proposal = {path: data.draw(distributions) for path in paths if len(path) < length}
    rows = SamplingRows("r", SamplingParams(), 0, 0, 0, length + 1, 0)
    emitted: dict[tuple[int, ...], float] = {}
    for drafted in itertools.product(range(V), repeat=length):
        q = [proposal[drafted[:k]] for k in range(length)]
        drawn = math.prod(row[x] for row, x in zip(q, drafted, strict=True))
        if drawn == 0:
            continue
        logits = torch.tensor([target[drafted[:k]] for k in range(length + 1)], dtype=torch.float64).log()
        draft = RequestDraft(list(drafted), "t", probs=torch.tensor(q, dtype=torch.float64).reshape(length, V))
        for probability, verdict in every_outcome(draft, logits, rows):
            if probability:
                tokens = tuple(verdict.token_ids)
                assert list(tokens[:-1]) == [drafted[node] for node in verdict.accepted]
                emitted[tokens] = emitted.get(tokens, 0.0) + drawn * probability

    # Emitted texts have different lengths: compare what each prefix has after it, by the law of plain decoding.
    assert sum(emitted.values()) == pytest.approx(1.0)
    mass: dict[tuple[int, ...], float] = {}
    for tokens, probability in emitted.items():
        for n in range(len(tokens) + 1):
            mass[tokens[:n]] = mass.get(tokens[:n], 0.0) + probability
    for path in paths:
        following = [mass.get((*path, x), 0.0) for x in range(V)]
        if sum(following):
            assert following == pytest.approx([sum(following) * p for p in target[path]], abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(target=distributions, proposal=distributions)
def test_rate_of_acceptance_is_one_minus_the_total_variation(target: list[float], proposal: list[float]) -> None:
    logits = torch.tensor([target, [1.0, 1.0, 1.0]], dtype=torch.float64).log()
    rows = SamplingRows("r", SamplingParams(), 0, 0, 0, 2, 0)
    rate = 0.0
    for x in range(V):
        draft = RequestDraft([x], "t", probs=torch.tensor([proposal], dtype=torch.float64))
        if proposal[x]:
            rate += proposal[x] * sum(p for p, verdict in every_outcome(draft, logits, rows) if verdict.accepted)
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

MOST = 55.5  # chi-square at 15 degrees of freedom: exceeded with p = 1.5e-6


def chi_square(rule: MatchVerifier, num_draws: int) -> float:
    """Pairs of tokens from a decoding loop with drafts of two, against the law: 16 cells of 20 or more expected.

    The draft's distributions are the target's in reverse, 0 to 0.47 apart from them in total variation; both depend on
    the first token. An error d in total variation of the pairs has a noncentrality of at least 4 num_draws d^2: with
    10,000 draws and d = 0.05 the test fails with probability above 0.999.
    """
    params = SamplingParams()
    target = [
        torch.tensor(w) for w in ([0.1, -0.6, 0.7, -0.3], [1.0, 0.2, -0.4, 0.1], [0.0] * 4, [-0.5, 0.3, 0.8, 0.0])
    ]
    first = torch.tensor([0.5, 0.9, -0.4, -0.2])
    after = {(): first, **{(x,): target[x] for x in range(4)}}
    q = {path: logits.flip(0).softmax(0) for path, logits in after.items()}
    counts = torch.zeros(4, 4)
    for seed in range(num_draws):
        text: list[int] = []
        while len(text) < 2:
            path = tuple(text)
            drafted: list[int] = []
            while len(path) < 2:
                drafted.append(draw(q[path].log(), seed, 0, len(path), Stream.DRAFT))
                path = (*path, drafted[-1])
            known = [(*text, *drafted[:k]) for k in range(len(drafted))]
            draft = RequestDraft(drafted, "t", probs=torch.stack([q[k] for k in known]))
            logits = torch.stack([*(after[k] for k in known), torch.zeros(4)])
            rows = SamplingRows("r", params, seed, 0, 0, len(drafted) + 1, len(text))
            text += rule.verify(Draft({"r": draft}), logits, [rows]).by_request["r"].token_ids
        counts[text[0], text[1]] += 1
    law = first.softmax(0).unsqueeze(1) * torch.stack([t.softmax(0) for t in target])
    assert law.min() * num_draws >= 20
    return float(((counts - law * num_draws) ** 2 / (law * num_draws)).sum())


class FromTarget(StandardVerifier):
    """Wrong on purpose: after a rejection it draws from the target instead of the residual."""

    def draw_residual(self, probs: Tensor, rows: SamplingRows, position: int) -> int:
        return self.draw_row(torch.tensor([0.5, 0.9, -0.4, -0.2]), rows, position)


def test_drawn_texts_follow_the_targets_law() -> None:
    assert chi_square(StandardVerifier(), 10_000) < MOST


def test_the_same_test_finds_a_wrong_residual() -> None:
    assert chi_square(FromTarget(), 2_500) > MOST
