"""Keeps the device's tables of running requests true where the host knows better, and reads what came of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.attention.slots import BlockTables, SlotBatch, SlotTables
from forerun.kernels.uploads import upload
from forerun.request import Request
from forerun.sampling.slots import PARAM_FIELDS, pack_params

if TYPE_CHECKING:
    from forerun.engine.plan import Plan


class Slots:
    """The rows of running requests in tables on the device, by `Request.slot`.

    Args:
        blocks: of each cache group, in the order of `Request.caches`.
        block_size: tokens a block.
        num_drafted: most drafted tokens of a request.

    Attributes:
        tables: where each sequence stands.
        params: [S, PARAM_FIELDS] int32, how each is drawn.
    """

    def __init__(self, blocks: Sequence[BlockTables], block_size: int, num_drafted: int) -> None:
        device = blocks[0].ints.device
        self.blocks = blocks
        self.block_size = block_size
        self.tables = SlotTables.new(blocks[0].num_slots - 1, num_drafted, device)
        self.params = torch.zeros(blocks[0].num_slots, PARAM_FIELDS, dtype=torch.int32, device=device)
        self._device = device
        # By slot, the request whose rows are true, and its preemptions: one that comes back may have gone on elsewhere.
        self._known: dict[int, tuple[Request, int]] = {}
        self._held: list[dict[int, list[int]]] = [{} for _ in blocks]  # blocks that the device knows of, by slot

    def leave(self, plan: Plan) -> None:
        """These requests go on where the device does not see it."""
        for s in plan.scheduled:
            self._known.pop(s.request.slot, None)

    def update(self, requests: Sequence[Request]) -> None:
        """Before requests are computed from the tables: what they lack."""
        stale = [r for r in requests if self._known.get(r.slot) != (r, r.num_preemptions)]
        if stale:
            rows = [_row(request) for request in stale]
            numbers = upload(rows, torch.int32, self._device)
            slots = upload([request.slot for request in stale], torch.int64, self._device)
            tables = self.tables
            tables.positions.index_copy_(0, slots, numbers[:, 0])
            tables.last.index_copy_(0, slots, numbers[:, 1:3])
            tables.first_positions.index_copy_(0, slots, numbers[:, 3])
            self.params.index_copy_(0, slots, numbers[:, 4:])
            for request in stale:
                self._known[request.slot] = request, request.num_preemptions
                for held in self._held:
                    held.pop(request.slot, None)
        for place, blocks in enumerate(self.blocks):
            self._update_blocks(place, blocks, requests)

    def _update_blocks(self, place: int, blocks: BlockTables, requests: Sequence[Request]) -> None:
        places: list[int] = []
        values: list[int] = []
        for request in requests:
            held, now = self._held[place].get(request.slot, []), request.caches[place].blocks
            if held == now:
                continue
            same = next(
                (i for i, (a, b) in enumerate(zip(held, now, strict=False)) if a != b), min(len(held), len(now))
            )
            base = blocks.first + request.slot * blocks.num_blocks
            places += range(base + same, base + len(now))
            values += now[same:]
            self._held[place][request.slot] = list(now)
        if places:
            numbers = upload([places, values], torch.int64, self._device)
            blocks.ints.index_copy_(0, numbers[0], numbers[1].int())

    def batch(self, requests: Sequence[Request], rows: Sequence[int], size: int, width: int) -> SlotBatch:
        """Of these requests, so many rows each, padded to `size` slots of `width` rows."""
        padding = size - len(requests)
        slots = [request.slot for request in requests] + [self.tables.padding] * padding
        numbers = upload([slots, [*rows, *([0] * padding)]], torch.int64, self._device)
        return SlotBatch(self.tables, numbers[0], numbers[1], width)


def _row(request: Request) -> list[int]:
    known = request.token_ids
    before = known[-2] if len(known) > 1 else 0
    params = pack_params(request.params, request.seed, request.choice, request.num_prompt_tokens)
    return [len(known) - 1, before, known[-1], request.num_prompt_tokens, *params]


class Reading:
    """Numbers on their way from the device to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._numbers = numbers.clone()

    def wait(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._numbers.tolist()
        return rows
