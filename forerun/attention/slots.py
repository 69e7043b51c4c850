"""Rows that only the device can place: which tokens they hold and where they lie follows from tables with a row a slot.

A running request has a *slot*. What a step changes of it, the device keeps in these tables itself, so that the next
step can be launched before the host has read what came of the last one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention.interface import QueryTile, StepLayout


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What the device knows of each slot's sequence; the last row is for padding.

    Attributes:
        positions: [S] int32, of the last known token, which is computed next.
        last: [S, 2] int32, the token before the last known one, and the last known one.
        drafted: [S, K] int32, what was drafted after it.
        first_positions: [S] int32, of the first output token.
    """

    positions: Tensor
    last: Tensor
    drafted: Tensor
    first_positions: Tensor

    @classmethod
    def new(cls, num_slots: int, num_drafted: int, device: torch.device) -> SlotTables:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        size = num_slots + 1
        return cls(zeros(size), zeros(size, 2), zeros(size, max(1, num_drafted)), zeros(size))

    @property
    def padding(self) -> int:
        """The slot of nobody."""
        return int(self.positions.shape[0]) - 1


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The blocks that each slot holds of one cache group.

    Attributes:
        ints: int32: 0, 1, 2 .. `first - 1`, then the tables, then room for what else a kernel's tiles point to.
        first: where the tables begin.
        num_blocks: entries a slot.
        num_slots: rows, with that of the padding.
    """

    ints: Tensor
    first: int
    num_blocks: int
    num_slots: int

    @classmethod
    def new(
        cls, num_slots: int, num_blocks: int, device: torch.device, *, most_rows: int = 0, spare: int = 0
    ) -> BlockTables:
        """most_rows: of a pass. spare: ints of room after the tables."""
        size = num_slots + 1
        ints = torch.zeros(most_rows + size * num_blocks + spare, dtype=torch.int32, device=device)
        ints[:most_rows] = torch.arange(most_rows, dtype=torch.int32, device=device)
        return cls(ints, most_rows, num_blocks, size)

    @property
    def spare(self) -> int:
        """Where the room after the tables begins."""
        return self.first + self.num_slots * self.num_blocks

    @property
    def blocks(self) -> Tensor:
        """[S, blocks] int32, a view."""
        return self.ints[self.first : self.spare].view(self.num_slots, self.num_blocks)


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """`width` rows for each of B slots, one slot after the other.

    Row r of a slot holds token `first + r` of its sequence, counted from the last known one: -1 is the one before it,
    1 the first drafted one; it lies at position `positions[slot] + shift + r`.

    Attributes:
        slots: [B] int64.
        rows: [B] int64, those that are used; the others, and their slots in the cache, are padding.
    """

    tables: SlotTables
    slots: Tensor
    rows: Tensor
    width: int
    first: int = 0
    shift: int = 0

    @property
    def num_slots(self) -> int:
        return int(self.slots.shape[0])

    @property
    def num_rows(self) -> int:
        return self.num_slots * self.width


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of a batch: what a model is given, and how they are drawn.

    Attributes:
        token_ids, positions: [N] int64; of padding 0.
        slots: [N] int64, of `SlotTables`.
        output_positions: [N] int64, of the tokens that the rows decide, counted from the first output token.
        kept: [M] int64, which rows a model is to be given; None: all, N = B * width, padding among them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    output_positions: Tensor
    kept: Tensor | None = None

    def pick(self, states: Tensor) -> Tensor:
        """Of states [N, H] those of the rows that a model is given."""
        return states if self.kept is None else states[self.kept]

    def spread(self, states: Tensor) -> Tensor:
        """What a model made of these rows, as [N, H]; padding is zero or anything."""
        if self.kept is None:
            return states
        out = states.new_zeros(self.token_ids.shape[0], *states.shape[1:])
        out[self.kept] = states[: self.kept.shape[0]]
        return out


def place_rows(batch: SlotBatch) -> SlotRows:
    """In plain torch, on any device."""
    tables, slots = batch.tables, batch.slots
    offsets = torch.arange(batch.width, device=slots.device)
    used = offsets < batch.rows[:, None]  # [B, W]
    sequence = torch.cat((tables.last, tables.drafted), dim=1)[slots].long()  # element 1 is the last known token
    elements = (offsets + batch.first + 1).clamp(max=sequence.shape[1] - 1).expand(batch.num_slots, -1)
    positions = tables.positions[slots].long()[:, None] + batch.shift + offsets
    output_positions = positions + 1 - tables.first_positions[slots].long()[:, None]
    return SlotRows(
        torch.where(used, sequence.gather(1, elements), 0).flatten(),
        torch.where(used, positions, 0).flatten(),
        slots[:, None].expand(-1, batch.width).flatten(),
        torch.where(used, output_positions, 0).flatten(),
    )


def host_layout(
    batch: SlotBatch, blocks: BlockTables, *, block_size: int, row_tile: int
) -> tuple[StepLayout, SlotRows]:
    """For backends that are told by the host, which reads the tables for it: the layout of the rows that are used, one
    after the other, and the batch's rows with these named."""
    rows = place_rows(batch)
    counts = batch.rows.tolist()
    kept = [b * batch.width + r for b, count in enumerate(counts) for r in range(count)]
    positions = rows.positions.tolist()
    places: list[int] = []
    tiles: list[QueryTile] = []
    for b, (count, slot) in enumerate(zip(counts, batch.slots.tolist(), strict=True)):
        first_row, first_position = len(places), positions[b * batch.width] if count else 0
        end = first_position + count
        table = blocks.blocks[slot, : -(-end // block_size)].tolist()
        places += [table[p // block_size] * block_size + p % block_size for p in range(first_position, end)]
        for start in range(0, count, row_tile):
            some = range(first_row + start, first_row + min(start + row_tile, count))
            tiles.append(QueryTile(some, first_position + start, table))
    named = dataclasses.replace(rows, kept=torch.tensor(kept, dtype=torch.int64, device=batch.slots.device))
    return StepLayout(torch.tensor(places, dtype=torch.int64), tiles), named
