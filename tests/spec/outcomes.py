"""Every way in which a rule's random decisions can go, with its probability: laws to rounding, without drawing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from forerun.request import SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import draw, processed_logprobs
from forerun.sampling.noise import Stream
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.verifier import RequestVerdict
from forerun.spec.verifiers.match import MatchVerifier

V = 3

Text = tuple[int, ...]
Laws = Mapping[Text, Sequence[float]]  # the next token's distribution after each text
Rule = Callable[[], MatchVerifier]
Outcomes = Iterator[tuple[float, RequestVerdict]]

weights = st.one_of(st.just(0.0), st.floats(0.01, 1))
distributions = st.lists(weights, min_size=V, max_size=V).filter(any).map(lambda w: [x / sum(w) for x in w])


class Decisions:
    """Random decisions taken from a list; each unlisted one goes to its first outcome."""

    def __init__(self, decisions: list[int]) -> None:
        self.decisions = decisions
        self.weights: list[list[float]] = []  # of the outcomes of each decision that was met

    def choose(self, weights: list[float]) -> int:
        place = len(self.weights)
        self.weights.append(weights)
        if place == len(self.decisions):
            self.decisions.append(0)
        return self.decisions[place]


def decided(rule: MatchVerifier, decisions: Decisions) -> MatchVerifier:
    """The real rule, with its draws replaced by the decisions."""

    def accepts(probability: float, rows: SamplingRows, position: int) -> bool:
        return decisions.choose([1 - probability, probability]) == 1

    def draw_row(logits: Tensor, rows: SamplingRows, position: int) -> int:
        return decisions.choose(processed_logprobs(logits, rows.params).exp().tolist())

    def draw_residual(probs: Tensor, rows: SamplingRows, position: int) -> int:
        return decisions.choose(probs.tolist())

    for method in (accepts, draw_row, draw_residual):
        setattr(rule, method.__name__, method)
    return rule


def every_outcome(make: Rule, draft: RequestDraft, logits: Tensor, rows: SamplingRows) -> Outcomes:
    """Each way the decisions can go that has a chance."""
    decisions: list[int] = []
    while True:
        met = Decisions(decisions)
        verdict = decided(make(), met).verify(Draft({"r": draft}), logits, [rows]).by_request["r"]
        del decisions[len(met.weights) :]
        if probability := math.prod(w[d] for w, d in zip(met.weights, decisions, strict=True)):
            yield probability, verdict
        while decisions and decisions[-1] + 1 == len(met.weights[len(decisions) - 1]):
            decisions.pop()
        if not decisions:
            return
        decisions[-1] += 1


def texts(longest: int) -> list[Text]:
    return [text for n in range(longest + 1) for text in itertools.product(range(V), repeat=n)]


def judged(make: Rule, target: Laws, proposal: Laws, drafted: Text, params: SamplingParams | None = None) -> Outcomes:
    """The outcomes for one chain that was drawn from `proposal`."""
    length = len(drafted)
    rows = SamplingRows("r", params or SamplingParams(), 0, 0, 0, length + 1, 0)
    logits = torch.tensor([target[drafted[:k]] for k in range(length + 1)], dtype=torch.float64).log()
    q = torch.tensor([proposal[drafted[:k]] for k in range(length)], dtype=torch.float64).reshape(length, V)
    return every_outcome(make, RequestDraft(list(drafted), "t", probs=q), logits, rows)


def all_drafts(proposal: Laws, length: int) -> Iterator[tuple[Text, float]]:
    """Every chain that can be drawn, with its probability."""
    for drafted in itertools.product(range(V), repeat=length):
        if drawn := math.prod(proposal[drafted[:k]][x] for k, x in enumerate(drafted)):
            yield drafted, drawn


def assert_law(emitted: Mapping[Text, float], target: Laws) -> None:
    """Emitted texts have different lengths: what follows each prefix has the law of plain decoding."""
    assert sum(emitted.values()) == pytest.approx(1.0)
    mass: dict[Text, float] = {}
    for text, probability in emitted.items():
        for n in range(len(text) + 1):
            mass[text[:n]] = mass.get(text[:n], 0.0) + probability
    for text, law in target.items():
        following = [mass.get((*text, x), 0.0) for x in range(V)]
        if sum(following):
            assert following == pytest.approx([sum(following) * p for p in law], abs=1e-9)


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
                drafted.append(draw(q[path].log(), seed, 0, len(text), Stream.DRAFT, len(drafted)))
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
