"""Drafts as CUDA graphs: a chain is many small passes, which take the host longer to launch than the GPU to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention.slots import SlotBatch


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph that drafts `num_tokens` tokens for each of the slots [B] int64, as many of them as its length [B] int64
    says."""

    num_tokens: int
    slots: Tensor
    lengths: Tensor
    graph: torch.cuda.CUDAGraph

    @property
    def num_slots(self) -> int:
        return int(self.slots.shape[0])

    def replay(self, batch: SlotBatch) -> None:
        """batch: of so many slots; its rows are the lengths."""
        self.slots.copy_(batch.slots)
        self.lengths.copy_(batch.rows)
        self.graph.replay()


class RecordedDrafts:
    """The graphs of a function that drafts.

    Args:
        draft: called with slots, lengths and `num_tokens`; all that it leaves is in memory that stays where it is.
    """

    def __init__(self, draft: Callable[[Tensor, Tensor, int], None]) -> None:
        self._draft = draft
        self._recorded: list[Recorded] = []

    @torch.inference_mode()
    def record(self, shapes: Sequence[tuple[int, int]], padding: int, device: torch.device) -> None:
        """Record a graph for each (slots, tokens). padding: the slot of nobody."""
        pool = torch.cuda.graph_pool_handle()  # one at a time is replayed
        for num_slots, num_tokens in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            slots = torch.full((num_slots,), padding, dtype=torch.int64, device=device)
            lengths = torch.zeros_like(slots)
            self._draft(slots, lengths, num_tokens)  # compiles kernels, and lets libraries take their memory
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._draft(slots, lengths, num_tokens)
            self._recorded.append(Recorded(num_tokens, slots, lengths, graph))

    def fitting(self, num_slots: int, num_tokens: int) -> Recorded | None:
        """The one with the fewest passes, then slots, that has room for so many."""
        fitting = (r for r in self._recorded if r.num_slots >= num_slots and r.num_tokens >= num_tokens)
        return min(fitting, key=lambda r: (r.num_tokens, r.num_slots), default=None)
