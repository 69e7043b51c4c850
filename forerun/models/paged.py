"""A model with the cache group that holds its keys and values: what the target and every draft model run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.attention import AttentionBackend, Segment, lay_out
from forerun.attention.native import NativeAttention
from forerun.attention.reference import ReferenceAttention
from forerun.kernels import cuda, native
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

    def logits(self, hidden: Tensor) -> Tensor: ...


def new_memory(num_bytes: int, device: torch.device) -> Tensor:
    """[bytes] uint8 zeros; on a CPU they take memory only once they are used."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))


def new_attention(
    config: DecoderConfig, memory: Tensor, kv_dtype: torch.dtype, block_size: int, *, alone: bool = False
) -> AttentionBackend:
    """The fastest backend there is.

    Args:
        memory: uint8 [bytes], a pool of all groups, or a head's own.
        alone: whether no other group has blocks in it.
    """
    spec = attention_spec(config, block_size)
    if cuda.serves(memory):
        from forerun.attention.triton import TritonAttention  # only where there is Triton

        return TritonAttention(spec, memory, kv_dtype, alone)
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
        return cls(model, new_attention(model.config, memory, kv_dtype, block_size, alone=alone), block_size)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], taps: Sequence[Tap] = ()) -> DecoderOutput:
        """One pass over all tokens of all segments: rows in their order, then padding to `row_multiple`."""
        token_ids = [token for segment in segments for token in segment.token_ids]
        positions = [position for segment in segments for position in segment.positions]
        padding = [0] * (-len(token_ids) % self.model.row_multiple)
        self.attention.begin(lay_out(segments, block_size=self.block_size, row_tile=self.attention.row_tile))
        return self.model.forward(
            torch.tensor(token_ids + padding, dtype=torch.int64, device=self.model.device),
            torch.tensor(positions + padding, dtype=torch.int64, device=self.model.device),
            self.attention.attend,
            taps,
        )

    @torch.inference_mode()
    def logits(self, output: DecoderOutput, rows: Sequence[int]) -> Tensor:
        """[R, V] float32 of some rows of a pass, ascending."""
        hidden = output.hidden
        if rows and rows[-1] - rows[0] + 1 == len(rows):  # neighbours: nothing to copy
            return self.model.logits(hidden[rows[0] : rows[-1] + 1])
        wanted = torch.tensor(rows, dtype=torch.int64, device=hidden.device)
        return self.model.logits(hidden.index_select(0, wanted))  # plain indexing wakes torch's threads
