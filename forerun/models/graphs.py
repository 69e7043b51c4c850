"""Small passes as CUDA graphs: launching a pass kernel by kernel takes the host longer than the GPU needs for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.attention import Segment, lay_out
from forerun.attention.layout import TILE_FIELDS, flatten_tiles
from forerun.attention.slots import BlockTables, SlotBatch, SlotRows
from forerun.attention.triton import TritonAttention
from forerun.attention.triton_slots import SlotLayout, lay_out_slots
from forerun.kernels.uploads import upload
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
    layout: SlotLayout

    @property
    def num_rows(self) -> int:
        return self.num_tiles * self.rows


class GraphedModel(PagedModel):
    """A PagedModel that replays a recorded graph where one fits the step, padded with rows that nobody reads."""

    def __init__(self, model: Model, attention: TritonAttention, block_size: int) -> None:
        super().__init__(model, attention, block_size)
        self._paged_attention = attention
        self._graphs: list[Recorded] = []
        self._taps: tuple[Tap, ...] = ()

    @torch.inference_mode()
    def record(
        self, shapes: Sequence[tuple[int, int]], blocks: BlockTables, taps: Sequence[Tap], *, trees: bool = False
    ) -> None:
        """Record a graph for each shape.

        Args:
            shapes: `memory.passes.graph_shapes`; at least one.
            blocks: tables for `forward_slots`; in the room after them goes what the host places.
            taps: what every pass must return.
            trees: whether drafts may be trees.
        """
        self._taps = tuple(taps)
        self._blocks = blocks
        self._paths = trees
        most_rows, most_tiles = max(n * r for n, r in shapes), max(n for n, _ in shapes)
        assert blocks.first >= most_rows, "the tables of blocks must begin after as many rows as a pass has"
        self._layout = SlotLayout.new(most_rows, most_tiles, self.model.device)
        pool = torch.cuda.graph_pool_handle()
        for num_tiles, num_rows in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            self._graphs.append(self._record(num_tiles, num_rows, pool))
        self._graphs.sort(key=lambda recorded: (recorded.rows, recorded.num_tiles))

    def _record(self, num_tiles: int, rows: int, pool: Any) -> Recorded:
        layout = self._layout.first(num_tiles * rows, num_tiles)
        self._pass(layout, rows)  # of padding alone: compiles kernels, and lets libraries take their memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._pass(layout, rows)
        return Recorded(num_tiles, rows, graph, output, layout)

    def _pass(self, layout: SlotLayout, rows: int) -> DecoderOutput:
        self._paged_attention.use(self._paged_attention.slot_tables(layout, self._blocks, rows, paths=self._paths))
        return self.model.forward(layout.token_ids, layout.positions, self.attention.attend, self._taps)

    def slot_shape(self, num_slots: int, width: int) -> tuple[int, int]:
        recorded = self._fitting(num_slots, width)
        return (num_slots, width) if recorded is None else (recorded.num_tiles, recorded.rows)

    @torch.inference_mode()
    def forward_slots(
        self,
        batch: SlotBatch,
        blocks: BlockTables,
        taps: Sequence[Tap] = (),
        fed: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[SlotRows, DecoderOutput]:
        recorded = self._fitting(batch.num_slots, batch.width)
        shape = (batch.num_slots, batch.width)
        if recorded is None or (recorded.num_tiles, recorded.rows) != shape or tuple(taps) != self._taps or fed:
            return super().forward_slots(batch, blocks, taps, fed)
        assert blocks is self._blocks
        lay_out_slots(batch, blocks, self.block_size, recorded.layout)
        recorded.graph.replay()
        return recorded.layout.rows, recorded.output

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], taps: Sequence[Tap] = ()) -> DecoderOutput:
        layout = lay_out(segments, block_size=self.block_size, row_tile=self.attention.row_tile)
        num_rows = max((len(tile.rows) for tile in layout.tiles), default=0)
        recorded = self._fitting(len(layout.tiles), num_rows) if tuple(taps) == self._taps else None
        if recorded is None or (not self._paths and any(tile.path_slots for tile in layout.tiles)):
            return super().forward(segments, taps)
        spare = self._blocks.spare
        ints, records = flatten_tiles(layout.tiles, "i", spare)
        if spare + len(ints) > self._blocks.ints.shape[0]:
            return super().forward(segments, taps)
        places = array("i", layout.slots.tolist())
        places.extend([-1] * (recorded.num_rows - len(places)))
        records.extend([0] * (recorded.num_tiles * TILE_FIELDS - len(records)))
        token_ids = array("q", (token for segment in segments for token in segment.token_ids))
        positions = array("q", (position for segment in segments for position in segment.positions))
        static, device = recorded.layout, self.model.device
        for numbers, memory in (
            (places, static.places),
            (records, static.tiles.view(-1)),
            (ints, self._blocks.ints[spare:]),
            (token_ids, static.token_ids),
            (positions, static.positions),
        ):
            memory[: len(numbers)].copy_(upload(numbers, memory.dtype, device))
        recorded.graph.replay()
        return recorded.output

    def _fitting(self, num_tiles: int, rows: int) -> Recorded | None:
        """The smallest graph that has room for so many tiles of so many rows."""
        fitting = (r for r in self._graphs if r.num_tiles >= num_tiles and r.rows >= rows)
        return min(fitting, key=lambda recorded: recorded.num_rows, default=None)
