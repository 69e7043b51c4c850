"""Drafts drawn at random and cut by a grammar leave the target its law; dropping the refused token would not."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.request import SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.spec.proposer import RequestDraft
from forerun.spec.verifiers.standard import StandardVerifier
from forerun.structured.processor import cut_draft
from tests.spec.outcomes import V, distributions, every_outcome

Law = dict[tuple[int, ...], list[float]]  # what follows each path
K = 2


def emitted(target: Law, proposal: Law, *, keep_refused: bool) -> dict[tuple[int, ...], float]:
    """Probability of each emitted text. A token of target probability 0 is one that the grammar refuses."""
    found: dict[tuple[int, ...], float] = {}
    for drafted in itertools.product(range(V), repeat=K):
        drawn = math.prod(proposal[drafted[:k]][x] for k, x in enumerate(drafted))
        if drawn == 0:
            continue
        draft = RequestDraft(
            list(drafted), "t", probs=torch.tensor([proposal[drafted[:k]] for k in range(K)], dtype=torch.float64)
        )
        allowed = list(itertools.takewhile(lambda k: target[drafted[:k]][drafted[k]] > 0, range(K)))  # noqa: B023
        draft = cut_draft(draft, allowed) if keep_refused else draft.cut(len(allowed))
        paths = [drafted[:k] for k in range(len(draft) + 1)]
        logits = torch.tensor([target[path] for path in paths], dtype=torch.float64).log()
        rows = SamplingRows("r", SamplingParams(), 0, 0, 0, len(draft) + 1, 0)
        for probability, verdict in every_outcome(StandardVerifier, draft, logits, rows):
            if probability:
                tokens = tuple(verdict.token_ids)
                found[tokens] = found.get(tokens, 0.0) + drawn * probability
    return found


def first_token(texts: dict[tuple[int, ...], float]) -> list[float]:
    return [sum(p for tokens, p in texts.items() if tokens[0] == x) for x in range(V)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_law_is_the_targets(data: st.DataObject) -> None:
    paths = [p for n in range(K + 1) for p in itertools.product(range(V), repeat=n)]
    target = {path: data.draw(distributions) for path in paths}
    proposal = {path: data.draw(distributions) for path in paths if len(path) < K}
    texts = emitted(target, proposal, keep_refused=True)
    mass: dict[tuple[int, ...], float] = {}
    for tokens, probability in texts.items():
        for n in range(len(tokens) + 1):
            mass[tokens[:n]] = mass.get(tokens[:n], 0.0) + probability
    for path in paths:
        following = [mass.get((*path, x), 0.0) for x in range(V)]
        if sum(following):
            assert following == pytest.approx([sum(following) * p for p in target[path]], abs=1e-9)


def test_dropping_the_refused_token_would_change_the_law() -> None:
    paths = [p for n in range(K + 1) for p in itertools.product(range(V), repeat=n)]
    target = {path: [0.2, 0.8, 0.0] for path in paths}
    proposal = {path: [0.6, 0.0, 0.4] for path in paths}
    assert first_token(emitted(target, proposal, keep_refused=True)) == pytest.approx([0.2, 0.8, 0.0])
    assert first_token(emitted(target, proposal, keep_refused=False)) == pytest.approx([0.28, 0.72, 0.0])
