"""A head that drafts by tables on the device: what `eagle.py` does, for steps that the host has not read yet.

What the host does not know is who accepted how much: positions, the last tokens and the head's states are in rows by
`Request.slot`. Of a draft's K passes each computes one row a slot, and writes what it drafts to `SlotTables.drafted`,
where the next one, and then the target, finds it. Afterwards all rows of the target's pass are filled: those that were
rejected hold anything, and are filled again before a later row sees them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.attention import AttentionBackend, lay_out
from forerun.attention.slots import BlockTables, SlotBatch
from forerun.kernels.uploads import upload
from forerun.models.heads.head import Head
from forerun.spec.proposer import KnownRows
from forerun.spec.proposers.recorded_drafts import RecordedDrafts

if TYPE_CHECKING:
    from forerun.engine.slots import Slots
    from forerun.request import Request


class SlotHead:
    """Drafts and follows.

    Args:
        head, attention: the network, and its keys and values beside the target's.
        slots: where the requests stand; blocks: those that they hold of the target.
        states: [S, H], by slot, of each request's last computed token.
    """

    def __init__(
        self, head: Head, attention: AttentionBackend, slots: Slots, blocks: BlockTables, states: Tensor
    ) -> None:
        self._head = head
        self._attention = attention
        self._slots = slots
        self._blocks = blocks
        self._states = states
        self._recorded = RecordedDrafts(self._draft_rows)

    def record(self, shapes: Sequence[tuple[int, int]]) -> None:
        """See `Proposer.attach_slots`. What is not recorded is run once: its kernels are compiled then."""
        self._recorded.record(self._slots, shapes)
        for width in {1, *(1 + num_tokens for _, num_tokens in shapes)}:
            for size in (1, 2):  # kernels for pointers that are aligned otherwise
                self._follow_nobody(size, width)

    def draft(self, requests: Sequence[Request], lengths: Sequence[int]) -> None:
        """So many tokens for each request, one at least."""
        self._recorded.draft(self._slots, requests, lengths)

    def _draft_rows(self, drafting: SlotBatch, num_tokens: int) -> None:
        """Row by row, from that of the last computed token on; rows past a slot's length are padding."""
        slots, tables = drafting.slots, drafting.tables
        states = self._states[slots]
        for place in range(num_tokens):
            going = (drafting.rows > place).long()
            batch = SlotBatch(tables, slots, going, 1, first=place, shift=place - 1)
            rows = self._attention.begin_slots(batch, self._blocks)
            token_ids, positions = rows.pick(rows.token_ids), rows.pick(rows.positions)
            output = self._head.forward(token_ids, rows.pick(states), positions, self._attention.attend)
            best = self._head.logits(output.normed).max(dim=-1).indices  # the first of the largest, as `Chooser`
            drafted = rows.spread(self._head.target_ids(best))
            tables.drafted[:, place].index_copy_(0, slots, drafted.int())
            states = rows.spread(output.hidden)

    def follow(self, batch: SlotBatch, positions: Tensor, verdict: Tensor, taps: Sequence[Tensor]) -> None:
        """See `Proposer.follow_slots`. taps: in the head's order."""
        count, width = len(verdict), batch.width
        before = batch.tables.positions.index_copy(0, batch.slots, positions)
        tables = dataclasses.replace(batch.tables, positions=before)
        slots = batch.slots[:count]
        rows = self._attention.begin_slots(SlotBatch(tables, slots, batch.rows[:count], width), self._blocks)
        states = self._head.combine([tap[: count * width] for tap in taps])
        next_tokens = verdict[:, 2:].flatten().long().clamp(min=0)  # -1 where a row does not stand
        self._fill(rows.pick(next_tokens), rows.pick(states), rows.pick(rows.positions))
        ends = torch.arange(count, device=slots.device) * width + verdict[:, 0]
        self._states.index_copy_(0, slots, states[ends])

    @torch.inference_mode()
    def _follow_nobody(self, size: int, width: int) -> None:
        batch, states = self._slots.batch([], [], size, width), self._states
        wide = states.new_zeros(size * width, self._head.config.target_hidden_size)
        verdict = torch.zeros(size, 2 + width, dtype=torch.int32, device=states.device)
        self.follow(batch, batch.tables.positions[batch.slots], verdict, [wide for _ in self._head.config.taps])

    def follow_known(self, rows: KnownRows, verdict: Tensor | None, taps: Sequence[Tensor], block_size: int) -> None:
        """See `Proposer.follow_known`."""
        device = self._states.device
        next_tokens: list[int] = []
        positions: list[int] = []
        ends: list[int] = []  # the last row of each request
        drawn: list[int] = []  # of them, those of requests that sampled
        for request, segment, samples in zip(rows.requests, rows.segments, rows.samples, strict=True):
            stop = segment.start + len(segment.token_ids)
            next_tokens += [*request.token_ids[segment.start + 1 : stop + 1], *([0] if samples else [])]
            positions += range(segment.start, stop)
            ends.append(len(next_tokens) - 1)
            drawn += ends[-1:] if samples else []
        tokens = upload(next_tokens, torch.int64, device)
        if verdict is not None:
            tokens.index_copy_(0, upload(drawn, torch.int64, device), verdict[:, 2].long().clamp(min=0))
        states = self._head.combine([tap[: len(next_tokens)] for tap in taps])
        self._attention.begin(lay_out(rows.segments, block_size=block_size, row_tile=self._attention.row_tile))
        self._fill(tokens, states, upload(positions, torch.int64, device))
        places = upload([[request.slot for request in rows.requests], ends], torch.int64, device)
        self._states.index_copy_(0, places[0], states[places[1]])

    def _fill(self, token_ids: Tensor, states: Tensor, positions: Tensor) -> None:
        """Rows past the head's context are of no use, but do no harm: nobody drafts there."""
        positions = positions.clamp(max=self._head.max_positions - 1)
        self._head.fill(token_ids, states, positions, self._attention.attend, self._attention.write)
