"""The rule `match`: the law of what is emitted is the target's, whatever is drafted; exactly, without drawing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.request import SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import processed_logprobs
from forerun.sampling.logprobs import add_logprobs
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.verifier import RequestVerdict
from forerun.spec.verifiers.match import MatchVerifier

V = 3


class EnumeratedDraws(MatchVerifier):
    """The target's draw at each row is given; the rest of the rule is the real one."""

    def __init__(self, draws: dict[int, int]) -> None:
        self.draws = draws  # row -> token

    def draw_row(self, logits: Tensor, rows: SamplingRows, position: int) -> int:
        return self.draws[int(logits[0].item())]  # the row's index is stored in its logits


def tree_drafts() -> st.SearchStrategy[RequestDraft]:
    @st.composite
    def build(draw: st.DrawFn) -> RequestDraft:
        nodes: list[int] = []
        parents: list[int] = []
        for node in range(draw(st.integers(0, 4))):
            parent = draw(st.integers(-1, node - 1))
            free = [t for t in range(V) if not any(p == parent and n == t for n, p in zip(nodes, parents, strict=True))]
            if free:
                nodes.append(draw(st.sampled_from(free)))
                parents.append(parent)
        chain = all(parent == place - 1 for place, parent in enumerate(parents))
        return RequestDraft(nodes, "t", None if chain and draw(st.booleans()) else parents)

    return build()


def distributions(rows: int) -> st.SearchStrategy[list[list[float]]]:
    one = st.lists(st.floats(0.01, 1), min_size=V, max_size=V).map(lambda w: [x / sum(w) for x in w])
    return st.lists(one, min_size=rows, max_size=rows)


@settings(max_examples=150, deadline=None)
@given(draft=tree_drafts(), probs=distributions(5))
def test_law_of_the_emitted_tokens_is_the_targets(draft: RequestDraft, probs: list[list[float]]) -> None:
    """Sum over every outcome of every row: P(emitted sequence) equals what plain decoding gives it.

    Plain decoding draws token by token; `law` extends an emitted prefix with the row of the node it ends in.
    """
    num_rows = len(draft) + 1
    rows = SamplingRows("r", SamplingParams(), 0, 0, 0, num_rows, 0)
    logits = torch.zeros(num_rows, V)
    logits[:, 0] = torch.arange(num_rows)
    emitted: dict[tuple[int, ...], float] = {}
    for draws in itertools.product(range(V), repeat=num_rows):
        verdict = EnumeratedDraws(dict(enumerate(draws))).verify(Draft({"r": draft}), logits, [rows]).by_request["r"]
        tokens = tuple(verdict.token_ids)
        emitted[tokens] = emitted.get(tokens, 0.0) + math.prod(probs[row][t] for row, t in enumerate(draws))
        assert [draft.tokens[node] for node in verdict.accepted] == list(tokens[:-1])
        assert all(draft.parent(n) == p for n, p in zip(verdict.accepted, [-1, *verdict.accepted], strict=False))

    def law(tokens: tuple[int, ...]) -> float:
        node, probability = -1, 1.0
        for token in tokens:
            probability *= probs[node + 1][token]
            node = next(
                (c for c in range(len(draft)) if draft.parent(c) == node and draft.tokens[c] == token), len(draft)
            )
        return probability

    assert sum(emitted.values()) == pytest.approx(1.0)
    for tokens, probability in emitted.items():
        assert probability == pytest.approx(law(tokens), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    draft=tree_drafts(),
    seed=st.integers(0, 2**63),
    position=st.integers(0, 1000),
    params=st.sampled_from(
        [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.5, top_p=0.8, logprobs=2)]
    ),
)
def test_path_is_that_of_plain_decoding(draft: RequestDraft, seed: int, position: int, params: SamplingParams) -> None:
    """With real noise: each emitted token is what an empty draft would have drawn at that output position."""
    logits = torch.randn(len(draft) + 1, V, generator=torch.Generator().manual_seed(seed % 1000))
    rows = SamplingRows("r", params, seed, 0, 0, len(draft) + 1, position)
    verdict = verify(Draft({"r": draft}), logits, rows)
    node = -1
    for depth, token in enumerate(verdict.token_ids):
        plain = SamplingRows("r", params, seed, 0, 0, 1, position + depth)
        alone = verify(Draft(), logits[node + 1 : node + 2], plain)
        assert alone.token_ids == [token]
        if params.logprobs is not None:
            assert verdict.logprobs is not None
            assert alone.logprobs == verdict.logprobs[depth : depth + 1]
        node = verdict.accepted[depth] if depth < len(verdict.accepted) else node


def verify(draft: Draft, logits: torch.Tensor, rows: SamplingRows) -> RequestVerdict:
    """With log-probabilities, as the engine adds them."""
    verdict = MatchVerifier().verify(draft, logits, [rows])
    add_logprobs(verdict, logits, [rows])
    return verdict.by_request["r"]


def test_rate_of_acceptance_is_the_tokens_probability() -> None:
    """A one-hot draft of token x is accepted with probability p(x), as by rejection sampling: 6 standard errors."""
    logits = torch.tensor([[1.0, 0.2, -0.5], [0.0, 0.0, 0.0]])
    probability = float(processed_logprobs(logits[0], SamplingParams()).exp()[1])
    draft = Draft({"r": RequestDraft([1], "t")})
    accepted = 0
    for seed in range(4000):
        rows = SamplingRows("r", SamplingParams(), seed, 0, 0, 2, 3)
        accepted += len(MatchVerifier().verify(draft, logits, [rows]).by_request["r"].accepted)
    assert accepted / 4000 == pytest.approx(probability, abs=6 * (probability * (1 - probability) / 4000) ** 0.5)
