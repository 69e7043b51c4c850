"""Small passes as CUDA graphs: launching a pass kernel by kernel takes the host longer than the GPU needs for it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.attention import Segment, StepLayout, lay_out
from forerun.attention.triton import Tables, TritonAttention, pack_layout
from forerun.models.decoder import DecoderOutput, Tap
from forerun.models.paged import Model, PagedModel


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph for steps of at most `num_tiles` tiles of at most `rows` rows each; its output is overwritten by the next
    replay of any graph."""

    num_tiles: int
    rows: int
    graph: torch.cuda.CUDAGraph
    output: DecoderOutput

    @property
    def num_rows(self) -> int:
        return self.num_tiles * self.rows


class GraphedModel(PagedModel):
    """A PagedModel that replays a recorded graph where one fits the step, padded with rows that nobody reads.

    Attributes:
        record_time_s, record_bytes: what recording took.
    """

    def __init__(self, model: Model, attention: TritonAttention, block_size: int) -> None:
        super().__init__(model, attention, block_size)
        self.record_time_s = 0.0
        self.record_bytes = 0
        self._paged_attention = attention
        self._graphs: list[Recorded] = []
        self._taps: tuple[Tap, ...] = ()

    @torch.inference_mode()
    def record(
        self, shapes: Sequence[tuple[int, int]], max_model_len: int, taps: Sequence[Tap], *, trees: bool = False
    ) -> None:
        """Record a graph for each shape.

        Args:
            shapes: `memory.passes.graph_shapes`; at least one.
            max_model_len: longest request, tokens.
            taps: what every pass must return.
            trees: whether drafts may be trees.
        """
        started, free_before = time.perf_counter(), torch.cuda.mem_get_info()[0]
        self._taps = tuple(taps)
        self._max_keys = max_model_len
        self._paths = trees
        most_rows, most_tiles = max(n * r for n, r in shapes), max(n for n, _ in shapes)
        ints = -(-max_model_len // self.block_size) + 3 * max(r for _, r in shapes)  # of a request: blocks, rows, slots
        capacity = len(pack_layout(EMPTY, most_rows, most_tiles)) + most_tiles * ints
        device = self.model.device
        self._numbers = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._inputs = torch.zeros(2, most_rows, dtype=torch.int64, device=device)  # token ids and positions
        pool = torch.cuda.graph_pool_handle()
        for num_tiles, num_rows in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            self._graphs.append(self._record(num_tiles, num_rows, pool))
        self._graphs.sort(key=lambda recorded: (recorded.rows, recorded.num_tiles))
        torch.cuda.synchronize()
        self.record_time_s = time.perf_counter() - started
        self.record_bytes = free_before - torch.cuda.mem_get_info()[0]

    def _record(self, num_tiles: int, rows: int, pool: Any) -> Recorded:
        self._fill(self._numbers, pack_layout(EMPTY, num_tiles * rows, num_tiles))
        tables = self._tables(num_tiles, rows)
        self._pass(num_tiles * rows, tables)  # compiles kernels, and lets libraries take their memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._pass(num_tiles * rows, tables)
        return Recorded(num_tiles, rows, graph, output)

    def _tables(self, num_tiles: int, rows: int) -> Tables:
        return self._paged_attention.tables(
            self._numbers, num_tiles * rows, num_tiles, rows, self._max_keys, paths=self._paths
        )

    def _pass(self, num_rows: int, tables: Tables) -> DecoderOutput:
        self._paged_attention.use(tables)
        token_ids, positions = self._inputs[:, :num_rows]
        return self.model.forward(token_ids, positions, self.attention.attend, self._taps)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], taps: Sequence[Tap] = ()) -> DecoderOutput:
        layout = lay_out(segments, block_size=self.block_size, row_tile=self.attention.row_tile)
        recorded = self._fitting(layout) if tuple(taps) == self._taps else None
        if recorded is None:
            return super().forward(segments, taps)
        packed = pack_layout(layout, recorded.num_rows, recorded.num_tiles)
        if len(packed) > self._numbers.shape[0]:
            return super().forward(segments, taps)
        self._fill(self._numbers, packed)
        inputs = torch.tensor(
            [
                [token for segment in segments for token in segment.token_ids],
                [position for segment in segments for position in segment.positions],
            ]
        )
        self._inputs[:, : inputs.shape[1]].copy_(inputs, non_blocking=True)
        recorded.graph.replay()
        return recorded.output

    def _fitting(self, layout: StepLayout) -> Recorded | None:
        """The smallest graph that has room for the layout."""
        if not self._paths and any(tile.path_slots for tile in layout.tiles):
            return None
        num_tiles, rows = len(layout.tiles), max((len(tile.rows) for tile in layout.tiles), default=0)
        fitting = (r for r in self._graphs if r.num_tiles >= num_tiles and r.rows >= rows)
        return min(fitting, key=lambda recorded: recorded.num_rows, default=None)

    @staticmethod
    def _fill(numbers: Tensor, packed: array[int]) -> None:
        numbers[: len(packed)].copy_(torch.frombuffer(packed, dtype=torch.int32), non_blocking=True)


EMPTY = StepLayout(torch.empty(0, dtype=torch.int64), ())
