"""A model with the cache group that holds its keys and values: what the target and every draft model run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.attention import AttentionBackend, Segment, lay_out
from forerun.attention.native import NativeAttention
from forerun.attention.reference import ReferenceAttention
from forerun.attention.slots import BlockTables, SlotBatch, SlotRows
from forerun.kernels import cuda, native
from forerun.kernels.uploads import upload
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Attend, Decoder, DecoderOutput, Tap, attention_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {name: DTYPES[name] for name in ("float32", "bfloat16")}  # "auto": what the model itself prefers


class Model(Protocol):
    """What is needed of a model; `models.decoder.Decoder` is one, and so is the tests' scripted target."""

    @property
    def row_multiple(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[Tap] = ()
    ) -> DecoderOutput: ...

    def logits(self, hidden: Tensor, dtype: torch.dtype | None = torch.float32) -> Tensor: ...


def new_memory(num_bytes: int, device: torch.device) -> Tensor:
    """[bytes] uint8 zeros; on a CPU they take memory only once they are used."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))


def new_attention(
    config: DecoderConfig,
    memory: Tensor,
    kv_dtype: torch.dtype,
    block_size: int,
    *,
    alone: bool = False,
    invariant: bool = False,
) -> AttentionBackend:
    """The fastest backend there is.

    Args:
        memory: uint8 [bytes], a pool of all groups, or a head's own.
        alone: whether no other group has blocks in it.
        invariant: see `AttentionSpec`.
    """
    spec = attention_spec(config, block_size, invariant=invariant)
    if cuda.serves(memory):
        from forerun.attention.triton import TritonAttention  # only where there is Triton
        from forerun.attention.triton_invariant import InvariantAttention

        backend = InvariantAttention if invariant else TritonAttention
        return backend(spec, memory, kv_dtype, alone)
    if memory.is_cpu and native.available():
        return NativeAttention(spec, memory, kv_dtype)
    return ReferenceAttention(spec, memory, kv_dtype, alone)


class PagedModel:
    """Runs a model over segments of several sequences at once.

    Args:
        model: the network.
        attention: the backend that owns the group's keys and values.
        block_size: tokens a block.
    """

    def __init__(self, model: Model, attention: AttentionBackend, block_size: int) -> None:
        self.model = model
        self.attention = attention
        self.block_size = block_size

    @classmethod
    def over(
        cls, model: Decoder, memory: Tensor, kv_dtype: torch.dtype, block_size: int, *, alone: bool = False
    ) -> PagedModel:
        """With the fastest backend there is: see `new_attention`."""
        attention = new_attention(model.config, memory, kv_dtype, block_size, alone=alone, invariant=model.invariant)
        return cls(model, attention, block_size)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], taps: Sequence[Tap] = ()) -> DecoderOutput:
        """One pass over all tokens of all segments: rows in their order, then padding to `row_multiple`."""
        token_ids = [token for segment in segments for token in segment.token_ids]
        positions = [position for segment in segments for position in segment.positions]
        padding = [0] * (-len(token_ids) % self.model.row_multiple)
        self.attention.begin(lay_out(segments, block_size=self.block_size, row_tile=self.attention.row_tile))
        return self.model.forward(
            upload(token_ids + padding, torch.int64, self.model.device),
            upload(positions + padding, torch.int64, self.model.device),
            self.attention.attend,
            taps,
        )

    def slot_shape(self, num_slots: int, width: int) -> tuple[int, int]:
        """(slots, width) of the batch that `forward_slots` computes so many of best, padded."""
        return num_slots, width

    @torch.inference_mode()
    def forward_slots(
        self,
        batch: SlotBatch,
        blocks: BlockTables,
        taps: Sequence[Tap] = (),
        fed: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[SlotRows, DecoderOutput]:
        """One pass over rows that the tables on the device place: what they are, and what came out, a row each of the
        batch, padding included; valid until the next pass.

        fed: what the model is given for token ids; None: themselves.
        """
        rows = self.attention.begin_slots(batch, blocks)
        if fed is not None:
            rows = dataclasses.replace(rows, token_ids=fed(rows.token_ids))
        token_ids, positions = rows.pick(rows.token_ids), rows.pick(rows.positions)
        if padding := -len(token_ids) % self.model.row_multiple:
            token_ids, positions = (torch.nn.functional.pad(t, (0, padding)) for t in (token_ids, positions))
        output = self.model.forward(token_ids, positions, self.attention.attend, taps)
        spread = {tap: rows.spread(state) for tap, state in output.taps.items()}
        return rows, DecoderOutput(rows.spread(output.hidden), spread)

    @torch.inference_mode()
    def logits(self, output: DecoderOutput, rows: Sequence[int]) -> Tensor:
        """[R, V] float32 of some rows of a pass, ascending."""
        hidden = output.hidden
        if rows and rows[-1] - rows[0] + 1 == len(rows):  # neighbours: nothing to copy
            return self.model.logits(hidden[rows[0] : rows[-1] + 1])
        wanted = upload(rows, torch.int64, hidden.device)
        return self.model.logits(hidden.index_select(0, wanted))  # plain indexing wakes torch's threads
