"""Dynamic draft trees as EAGLE-2 grows them: which nodes to look at next, and which to have verified.

    logits of the row of the last known token        -> plant: its top_k children, all of them the first frontier
    depth times: one head pass over the frontier     -> expand: top_k children a node; of all these children the top_k
                                                        most probable are the next frontier
    prune: of all nodes ever drafted (the pool) the num_draft_tokens most probable, which are a tree again

So a path has at most depth + 1 tokens, and a pool top_k + depth * top_k^2. How probable a node is: the product of the
draft's probabilities from the root, at temperature 1 whatever the request's is. The rows of a frontier share a position
and see the committed tokens, their own ancestors and themselves; each is fed the state of the row that drafted it.

Ties, which the papers leave open: children of a node go to the lower draft id, nodes to the lower pool number. Pool
numbers rise by pass, then by the parent's rank in its frontier, then by the child's rank; so a parent wins against a
child of the same probability, and every choice of the best is closed under ancestors.

Pure functions; no head, cache or request. Not for static trees.

Source: Li et al. 2024, arXiv 2406.16858, section 4, and the code published with it.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.spec.proposer import RequestDraft

ROOT = -1
LEAST, MOST = sys.float_info.min, 1 - sys.float_info.epsilon  # confidences lie in (0, 1)


@dataclass(frozen=True, slots=True)
class Pool:
    """All nodes drafted so far; a node's number is its place in these lists.

    Attributes:
        tokens: target ids.
        parents: their numbers, ROOT for children of the last known token. A parent comes before its children.
        scores: log of the product of the draft's probabilities from the root.
        frontier: the nodes of the next pass, most probable first.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    frontier: list[int]

    def path(self, node: int) -> list[int]:
        """The node's ancestors from the root's child on, then itself."""
        path = [node]
        while (parent := self.parents[path[-1]]) != ROOT:
            path.append(parent)
        return path[::-1]


def best_children(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The most probable tokens after each row.

    Args:
        logits: [R, Vd] floating, of one head pass.
        top_k: at least 1; at most Vd are returned.
    Returns:
        ids [R, k] int64 in draft ids and their log-probabilities [R, k] float32, best first; equals by id. A row that
        holds NaN, or nothing finite, gives some ids, all of log-probability minus infinity.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    log_probs = log_probs.masked_fill(log_probs.isnan(), -torch.inf)
    k = min(top_k, logits.shape[-1])
    least = log_probs.topk(k).values[:, -1:]
    ids = torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
    for row, candidates in enumerate(log_probs >= least):  # k of them, and those that equal the last
        places = candidates.nonzero().flatten()
        order = log_probs[row, places].sort(descending=True, stable=True).indices
        ids[row] = places[order[:k]]
    return ids, log_probs.gather(1, ids)


def plant(tokens: Sequence[int], log_probs: Sequence[float]) -> Pool:
    """The children of the root, best first: a row of `best_children`, in target ids."""
    return Pool(list(tokens), [ROOT] * len(tokens), list(log_probs), list(range(len(tokens))))


def expand(pool: Pool, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], top_k: int) -> Pool:
    """Add the children of the frontier, and choose the next.

    Args:
        tokens, log_probs: for each node of `pool.frontier`, in its order, a row of `best_children`, in target ids.
        top_k: most nodes of the next frontier.
    """
    assert len(tokens) == len(log_probs) == len(pool.frontier)
    parents = [parent for parent, row in zip(pool.frontier, tokens, strict=True) for _ in row]
    scores = [
        pool.scores[parent] + log_prob for parent, row in zip(pool.frontier, log_probs, strict=True) for log_prob in row
    ]
    first = len(pool.tokens)
    best = heapq.nsmallest(top_k, range(len(scores)), key=lambda child: (-scores[child], child))
    return Pool(
        pool.tokens + [token for row in tokens for token in row],
        pool.parents + parents,
        pool.scores + scores,
        [first + child for child in best],
    )


def prune(pool: Pool, num_draft_tokens: int, source: str = "") -> RequestDraft:
    """The most probable nodes as a draft, in the order of the pool.

    Args:
        num_draft_tokens: most tokens of the draft, the root not counted.
        source: the proposer's name.
    """
    best = heapq.nsmallest(num_draft_tokens, range(len(pool.tokens)), key=lambda node: (-pool.scores[node], node))
    nodes = sorted(best)
    place = {node: index for index, node in enumerate(nodes)} | {ROOT: ROOT}
    return RequestDraft(
        tokens=[pool.tokens[node] for node in nodes],
        source=source,
        parents=[place[pool.parents[node]] for node in nodes],
        confidence=[min(max(math.exp(pool.scores[node]), LEAST), MOST) for node in nodes],
    )
