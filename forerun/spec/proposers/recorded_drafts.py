"""Drafts as CUDA graphs: a chain is many small passes, which take the host longer to launch than the GPU to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forerun.attention.slots import SlotBatch

if TYPE_CHECKING:
    from forerun.engine.slots import Slots
    from forerun.request import Request


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph that drafts `num_tokens` tokens for each slot of the batch, as many of them as its rows say."""

    num_tokens: int
    batch: SlotBatch
    graph: torch.cuda.CUDAGraph


class RecordedDrafts:
    """The graphs of a function that drafts.

    Args:
        draft: called with a batch of one row, whose `rows` say how far each slot drafts, and the longest of them; all
            that it leaves is in memory that stays where it is.
    """

    def __init__(self, draft: Callable[[SlotBatch, int], None]) -> None:
        self._draft = draft
        self._recorded: list[Recorded] = []

    @torch.inference_mode()
    def record(self, slots: Slots, shapes: Sequence[tuple[int, int]]) -> None:
        """Record a graph for each (slots, tokens)."""
        if not shapes:
            return
        pool = torch.cuda.graph_pool_handle()  # one at a time is replayed
        for num_slots, num_tokens in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            batch = slots.batch([], [], num_slots, 1)
            self._draft(batch, num_tokens)  # compiles kernels, and lets libraries take their memory
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._draft(batch, num_tokens)
            self._recorded.append(Recorded(num_tokens, batch, graph))

    def draft(self, slots: Slots, requests: Sequence[Request], lengths: Sequence[int]) -> None:
        """So many tokens for each request, one at least."""
        recorded = self._fitting(len(requests), max(lengths))
        if recorded is None:
            self._draft(slots.batch(requests, lengths, len(requests), 1), max(lengths))
            return
        batch = slots.batch(requests, lengths, recorded.batch.num_slots, 1)
        recorded.batch.slots.copy_(batch.slots)
        recorded.batch.rows.copy_(batch.rows)
        recorded.graph.replay()

    def _fitting(self, num_slots: int, num_tokens: int) -> Recorded | None:
        """The one with the fewest passes, then slots, that has room for so many."""
        fitting = (r for r in self._recorded if r.batch.num_slots >= num_slots and r.num_tokens >= num_tokens)
        return min(fitting, key=lambda r: (r.num_tokens, r.batch.num_slots), default=None)
