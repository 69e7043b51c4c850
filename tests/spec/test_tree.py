"""Dynamic trees against the published procedure, written down in numpy with its own numbering of nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forerun.spec.proposer import RequestDraft
from forerun.spec.tree import ROOT, Pool, best_children, expand, plant, prune

Array = NDArray[np.float64]
LogitsOf = Callable[[tuple[int, ...]], Array]
"""The head: tokens from the root's child on -> logits [V] of what follows."""


@dataclass
class Published:
    """What EAGLE's code hands to the target: the root first, then the nodes."""

    tokens: list[int]
    mask: NDArray[np.bool_]  # [T + 1, T + 1]
    positions: list[int]  # counted from the root's
    paths: list[list[int]]  # one a leaf, root to leaf, -1 behind it


def published(logits_of: LogitsOf, root: int, k: int, depth: int, num_nodes: int) -> Published:
    """The procedure with the published bookkeeping: k + depth * k^2 nodes, the parent of node j in entry j // k."""
    log_probs, tokens = _top(logits_of(()), k)
    pool_scores, pool_tokens, entries = [log_probs], [tokens], [np.zeros(1, np.int64)]
    scores, paths = log_probs, [(int(token),) for token in tokens]
    chosen = np.arange(k)  # the frontier's places among the candidates that it was chosen from
    for i in range(depth):
        entries.append(chosen + 1 + k * k * max(0, i - 1) + (k if i > 0 else 0))
        tops = [_top(logits_of(path), k) for path in paths]
        cumulative = np.stack([score + top[0] for score, top in zip(scores, tops, strict=True)])  # [k, k]
        candidates = np.stack([top[1] for top in tops])
        pool_scores.append(cumulative.ravel())
        pool_tokens.append(candidates.ravel())
        chosen = np.argsort(-cumulative.ravel(), kind="stable")[:k]
        scores = cumulative.ravel()[chosen]
        paths = [(*paths[c // k], int(candidates.ravel()[c])) for c in chosen]

    all_scores, all_tokens = np.concatenate(pool_scores), np.concatenate(pool_tokens)
    best = np.sort(np.argsort(-all_scores, kind="stable")[:num_nodes])
    parent_entries = np.concatenate(entries)[best // k]  # 0: the root; e: pool node e - 1
    parents = [0 if entry == 0 else int(np.searchsorted(best, entry - 1)) + 1 for entry in parent_entries]
    mask = np.eye(len(best) + 1, dtype=np.bool_)
    mask[:, 0] = True
    for i, parent in enumerate(parents):
        mask[i + 1] |= mask[parent]
    positions = [int(row.sum()) - 1 for row in mask]
    leaves = [i for i in range(len(mask)) if i not in parents]
    longest = max(positions) + 1
    leaf_paths = [[*np.flatnonzero(mask[leaf]).tolist(), *[-1] * (longest - positions[leaf] - 1)] for leaf in leaves]
    return Published([root, *all_tokens[best].tolist()], mask, positions, leaf_paths)


def _top(logits: Array, k: int) -> tuple[Array, NDArray[np.int64]]:
    """log-probabilities and ids, best first, equals by id. Probabilities as the head gives them, in float32."""
    log_probs = torch.log_softmax(torch.tensor(logits, dtype=torch.float32), -1).double().numpy()
    ids = np.argsort(-log_probs, kind="stable")[:k]
    return log_probs[ids], ids


def grown(logits_of: LogitsOf, k: int, depth: int) -> Pool:
    def children(paths: list[tuple[int, ...]]) -> tuple[list[list[int]], list[list[float]]]:
        rows = np.stack([logits_of(path) for path in paths])
        ids, log_probs = best_children(torch.tensor(rows, dtype=torch.float32), k)
        return ids.tolist(), log_probs.tolist()

    (ids,), (log_probs,) = children([()])
    pool = plant(ids, log_probs)
    for _ in range(depth):
        paths = [tuple(pool.tokens[node] for node in pool.path(front)) for front in pool.frontier]
        pool = expand(pool, *children(paths), k)
    return pool


def laid_out(draft: RequestDraft, root: int) -> Published:
    """The draft as the target would see it."""
    count = len(draft) + 1
    mask = np.eye(count, dtype=np.bool_)
    mask[:, 0] = True
    for node in range(len(draft)):
        mask[node + 1] |= mask[draft.parent(node) + 1]
    positions = [0, *(draft.depth(node) for node in range(len(draft)))]
    leaves = sorted(set(range(count)) - {draft.parent(node) + 1 for node in range(len(draft))})
    longest = max(positions) + 1
    paths = [[*np.flatnonzero(mask[i]).tolist(), *[-1] * (longest - positions[i] - 1)] for i in leaves]
    return Published([root, *draft.tokens], mask, positions, paths)


def assert_same(draft: RequestDraft, expected: Published) -> None:
    found = laid_out(draft, expected.tokens[0])
    assert found.tokens == expected.tokens
    assert np.array_equal(found.mask, expected.mask)
    assert found.positions == expected.positions
    assert found.paths == expected.paths


def random_logits(seed: int, vocab_size: int, levels: int) -> LogitsOf:
    """levels: so many different logits only, so that there are ties; 0: none are equal."""

    def logits_of(path: tuple[int, ...]) -> Array:
        generator = np.random.default_rng([seed, *path, len(path)])
        return generator.integers(0, levels, vocab_size).astype(float) if levels else generator.normal(0, 2, vocab_size)

    return logits_of


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    k=st.integers(1, 5),
    depth=st.integers(0, 4),
    extra=st.integers(0, 4),
    levels=st.sampled_from([0, 1, 2, 3]),
    num_nodes=st.integers(1, 40),
)
def test_trees_are_the_published_ones(seed: int, k: int, depth: int, extra: int, levels: int, num_nodes: int) -> None:
    logits_of = random_logits(seed, k + extra, levels)
    draft = prune(grown(logits_of, k, depth), num_nodes)
    assert_same(draft, published(logits_of, 99, k, depth, min(num_nodes, k + depth * k * k)))


def test_the_example_of_two_children() -> None:
    """A(-0.2), B(-1.8); below A: -0.5 and -1.3 in all; below B: -2.0 and -3.9: the best four are A, B, A1, A2."""
    pool = expand(plant([10, 20], [-0.2, -1.8]), [[11, 12], [21, 22]], [[-0.3, -1.1], [-0.2, -2.1]], 2)
    assert pool.tokens == [10, 20, 11, 12, 21, 22]
    assert pool.parents == [ROOT, ROOT, 0, 0, 1, 1]
    assert pool.frontier == [2, 3]
    draft = prune(pool, 4, "eagle")
    assert draft.tokens == [10, 20, 11, 12]
    assert draft.parents == [ROOT, ROOT, 0, 0]
    assert draft.source == "eagle"
    assert draft.confidence == pytest.approx([math.exp(s) for s in (-0.2, -1.8, -0.5, -1.3)])
    found = laid_out(draft, 7)
    assert [np.flatnonzero(row).tolist() for row in found.mask] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]]
    assert found.positions == [0, 1, 1, 2, 2]
    assert sorted(found.paths) == [[0, 1, 3], [0, 1, 4], [0, 2, -1]]


@pytest.mark.parametrize(("k", "depth"), [(3, 0), (3, 1), (2, 4), (4, 3)])
def test_sizes_of_pools_and_paths(k: int, depth: int) -> None:
    pool = grown(random_logits(3, 9, 0), k, depth)
    assert len(pool.tokens) == k + depth * k * k
    assert max(len(pool.path(node)) for node in range(len(pool.tokens))) == depth + 1
    assert len(pool.frontier) == k


def test_the_frontier_is_the_best_of_the_last_pass_only() -> None:
    """A node that an earlier pass left behind is not looked at again, however probable."""
    pool = expand(plant([1, 2], [-0.1, -0.2]), [[3, 4], [5, 6]], [[-3.0, -4.0], [-5.0, -6.0]], 2)
    assert pool.frontier == [2, 3]
    pool = expand(pool, [[7, 8], [9, 10]], [[-1.0, -2.0], [-0.5, -3.0]], 2)
    assert pool.frontier == [6, 8]  # -4.1 of the first, -4.6 of the second


def test_ties_go_to_lower_ids_and_lower_numbers() -> None:
    ids, log_probs = best_children(torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [2.0] * 5]), 3)
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert torch.equal(log_probs[1], torch.full((3,), -math.log(5)))
    certain = expand(plant([1, 2], [0.0, -1.0]), [[3, 4], [5, 6]], [[0.0, -9.0], [0.0, -9.0]], 2)
    assert prune(certain, 1).tokens == [1]  # its child is as probable
    assert prune(certain, 2).tokens == [1, 3]
    assert prune(certain, 3).tokens == [1, 2, 3]  # 5 is as probable as 2, its parent
    assert all(0 < value < 1 for value in prune(certain, 6).confidence or [])


def test_a_small_vocabulary_gives_fewer_children() -> None:
    pool = grown(random_logits(1, 3, 0), 5, 1)
    assert len(pool.tokens) == 3 + 9
    assert len(pool.frontier) == 5
    assert len(prune(pool, 100)) == 12


def test_a_broken_head_drafts_something() -> None:
    ids, log_probs = best_children(torch.tensor([[1.0, torch.nan, 2.0], [-torch.inf] * 3, [0.0, 1.0, 2.0]]), 2)
    assert ids.tolist() == [[0, 1], [0, 1], [2, 1]]
    pool = expand(plant(ids[0].tolist(), log_probs[0].tolist()), ids[:2].tolist(), log_probs[:2].tolist(), 2)
    assert prune(pool, 3).parents == [ROOT, ROOT, 0]


def test_children_are_the_best_of_a_large_vocabulary() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    ids, log_probs = best_children(logits, 10)
    expected = torch.log_softmax(logits, -1).topk(10)
    assert torch.equal(ids, expected.indices)
    assert torch.equal(log_probs, expected.values)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), levels=st.sampled_from([0, 1, 2]), num_nodes=st.integers(1, 30))
def test_a_cut_draft_is_a_draft(seed: int, levels: int, num_nodes: int) -> None:
    draft = prune(grown(random_logits(seed, 6, levels), 3, 3), num_nodes)
    assert draft.parents is not None
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert len({(p, t) for p, t in zip(draft.parents, draft.tokens, strict=True)}) == len(draft)  # distinct children
