"""The layout of a step that the device works out itself: the twin of `slots.place_rows`, with the tables of a pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.attention.layout import TILE_FIELDS
from forerun.attention.slots import BlockTables, SlotBatch, SlotRows


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where `lay_out_slots` writes. The first four are `SlotRows`'; places: [N] int32, the rows' places in the cache,
    -1 for padding; tiles: [B, TILE_FIELDS] int32, whose ints are those of the `BlockTables`."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    output_positions: Tensor
    places: Tensor
    tiles: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_tiles: int, device: torch.device) -> SlotLayout:
        """For a batch of exactly so many rows: all of it is written."""

        def wide() -> Tensor:
            return torch.empty(num_rows, dtype=torch.int64, device=device)

        places = torch.empty(num_rows, dtype=torch.int32, device=device)
        tiles = torch.empty(num_tiles, TILE_FIELDS, dtype=torch.int32, device=device)
        return cls(wide(), wide(), wide(), wide(), places, tiles)

    @classmethod
    def new(cls, num_rows: int, num_tiles: int, device: torch.device) -> SlotLayout:
        """Of padding alone."""
        layout = cls.empty(num_rows, num_tiles, device)
        layout.places.fill_(-1)
        for memory in (layout.token_ids, layout.positions, layout.slots, layout.output_positions, layout.tiles):
            memory.zero_()
        return layout

    @property
    def rows(self) -> SlotRows:
        return SlotRows(self.token_ids, self.positions, self.slots, self.output_positions)

    def first(self, num_rows: int, num_tiles: int) -> SlotLayout:
        """The same memory, as far as a smaller pass needs it."""
        return SlotLayout(
            self.token_ids[:num_rows],
            self.positions[:num_rows],
            self.slots[:num_rows],
            self.output_positions[:num_rows],
            self.places[:num_rows],
            self.tiles[:num_tiles],
        )


@triton.jit(do_not_specialize=["tables_at", "first", "shift"])
def _lay_out(
    slots, rows, positions, last, drafted, first_positions, ints,
    token_ids, row_positions, row_slots, output_positions, places, tiles,
    tables_at, num_blocks, num_drafted, first, shift,
    FIELDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    count = tl.load(rows + b).to(tl.int32)
    r = tl.arange(0, BLOCK)
    inside = r < WIDTH
    used = r < count
    element = first + r  # 0 is the last known token
    known = tl.load(last + slot * 2 + 1 + tl.minimum(element, 0), mask=used & (element <= 0), other=0)
    guess = tl.load(drafted + slot * num_drafted + tl.maximum(element - 1, 0), mask=used & (element > 0), other=0)
    start = tl.load(positions + slot) + shift
    position = tl.where(used, start + r, 0)
    output = tl.where(used, position + 1 - tl.load(first_positions + slot), 0)
    table_at = tables_at + slot.to(tl.int32) * num_blocks
    block = tl.load(ints + table_at + position // BLOCK_SIZE, mask=used, other=0)
    row = b * WIDTH + r
    tl.store(token_ids + row, tl.where(element <= 0, known, guess).to(tl.int64), mask=inside)
    tl.store(row_positions + row, position.to(tl.int64), mask=inside)
    tl.store(row_slots + row, tl.zeros([BLOCK], tl.int64) + slot, mask=inside)
    tl.store(output_positions + row, output.to(tl.int64), mask=inside)
    tl.store(places + row, tl.where(used, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)
    record = tiles + b * FIELDS
    tl.store(record, b * WIDTH)  # the ints begin with 0, 1, 2 ..
    tl.store(record + 1, count)
    tl.store(record + 2, start)
    tl.store(record + 3, table_at)
    tl.store(record + 4, 0)
    tl.store(record + 5, 0)
    tl.store(record + 6, 0)


def lay_out_slots(batch: SlotBatch, blocks: BlockTables, block_size: int, into: SlotLayout) -> None:
    """One launch; `into` has room for exactly the batch."""
    tables = batch.tables
    _lay_out[(batch.num_slots,)](
        batch.slots, batch.rows, tables.positions, tables.last, tables.drafted, tables.first_positions, blocks.ints,
        into.token_ids, into.positions, into.slots, into.output_positions, into.places, into.tiles,
        blocks.first, blocks.num_blocks, tables.drafted.shape[1], batch.first, batch.shift,
        FIELDS=TILE_FIELDS, BLOCK_SIZE=block_size, WIDTH=batch.width, BLOCK=max(2, triton.next_power_of_2(batch.width)),
    )  # fmt: skip
