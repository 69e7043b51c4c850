"""From a plan of ints to tensors: which tokens, at which positions, written where, seeing what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention import QueryTile, StepLayout
from forerun.engine.plan import Plan, ScheduledRequest
from forerun.spec.proposer import RequestDraft


@dataclass(frozen=True, slots=True)
class StepInputs:
    """token_ids, positions: [T] int64, rows in the plan's order and then padding to a multiple; logit_rows: [R] rows
    that need logits."""

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    layout: StepLayout


def build_inputs(plan: Plan, *, block_size: int, row_tile: int, row_multiple: int) -> StepInputs:
    """Lay a plan out. A drafted token i lies at slot (known tokens + i), wherever its branch stands in the tree."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    tiles: list[QueryTile] = []
    for s in plan.scheduled:
        first_row = len(token_ids)
        known = s.start + s.num_tokens
        token_ids += s.request.token_ids[s.start : known]
        token_ids += s.draft.tokens
        positions += range(s.start, known)
        positions += [known - 1 + s.draft.depth(node) for node in range(len(s.draft))]
        table = s.request.block_tables[0]
        slots += [table[p // block_size] * block_size + p % block_size for p in range(s.start, known + len(s.draft))]
        tiles += _tiles(s, first_row, slots[first_row:], row_tile)
        if s.samples:
            logit_rows += range(first_row + s.num_tokens - 1, first_row + s.num_rows)
    padding = [0] * (-len(token_ids) % row_multiple)
    return StepInputs(
        _ids(token_ids + padding), _ids(positions + padding), _ids(logit_rows), StepLayout(_ids(slots), tiles)
    )


def _ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _tiles(s: ScheduledRequest, first_row: int, slots: list[int], row_tile: int) -> Iterator[QueryTile]:
    table = s.request.block_tables[0]
    if s.draft.parents is None:
        for start in range(0, s.num_rows, row_tile):
            rows = range(first_row + start, first_row + min(start + row_tile, s.num_rows))
            yield QueryTile(rows, s.start + start, table)
        return
    for start in range(0, s.num_tokens, row_tile):
        rows = range(first_row + start, first_row + min(start + row_tile, s.num_tokens))
        yield QueryTile(rows, s.start + start, table)
    known = s.start + s.num_tokens
    for path, first_new in _paths(s.draft):
        path_slots = [slots[s.num_tokens + node] for node in path]
        for start in range(first_new, len(path), row_tile):
            nodes = path[start : start + row_tile]
            rows_of_path = [first_row + s.num_tokens + node for node in nodes]
            num_seen = start + len(nodes)
            yield QueryTile(rows_of_path, known + start, table, known, path_slots[:num_seen])


def _paths(draft: RequestDraft) -> Iterator[tuple[list[int], int]]:
    """Root-to-leaf paths that cover every node, each with the place of its first node that no earlier path has."""
    parents = {draft.parent(node) for node in range(len(draft))}
    covered: set[int] = set()
    for leaf in range(len(draft)):
        if leaf in parents:
            continue
        path = [leaf]
        while (node := draft.parent(path[-1])) >= 0:
            path.append(node)
        path.reverse()
        first_new = next(place for place, node in enumerate(path) if node not in covered)
        covered.update(path)
        yield path, first_new
