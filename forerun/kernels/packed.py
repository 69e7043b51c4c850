"""Linear layers on packed weights: 4-bit, int8 and bf16 matrices as the CPU extension multiplies them.

A packed weight has exactly the values of the tensor it was made of. Activations are float32; for quantised weights each
row is first rounded to int8 with a scale for each 32 values, where it matters most twice: x, and what that left over;
for bf16 weights they stay float32. A row's result has the same bits in any call, with any threads, on any instruction
set.

Not for the case without the extension: `forerun.kernels.native.available()` is asked before anything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor

from forerun.kernels.buffers import allocate
from forerun.kernels.native import extension

KINDS = {
    GGMLQuantizationType.Q4_0: "q4_0",
    GGMLQuantizationType.Q4_1: "q4_1",
    GGMLQuantizationType.Q4_K: "q4_k",
    GGMLQuantizationType.Q5_0: "q5_0",
    GGMLQuantizationType.Q5_1: "q5_1",
    GGMLQuantizationType.Q5_K: "q5_k",
    GGMLQuantizationType.Q6_K: "q6_k",
    GGMLQuantizationType.Q8_0: "q8_0",
    GGMLQuantizationType.IQ4_NL: "q8_0",  # its 16 levels are whole numbers
    GGMLQuantizationType.BF16: "bf16",
}
"""The packed kind that keeps the values of a GGUF type. Others must be dequantised first."""

FLOATING = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


def packed_kind(ggml_type: int) -> str | None:
    """The packed kind that keeps this GGUF type's values exactly, or None."""
    return KINDS.get(GGMLQuantizationType(ggml_type))


def packed_bytes(kind: str, num_rows: int, k: int) -> int:
    """Memory of a packed weight [num_rows, k]."""
    return int(extension().packed_bytes(kind, num_rows, k))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [N, K] in the form that the extension multiplies.

    Attributes:
        kind: q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0 or bf16.
        data: uint8, its bytes; rows that were never packed are zero.
    """

    kind: str
    shape: tuple[int, int]
    data: Tensor

    @classmethod
    def empty(cls, kind: str, num_rows: int, k: int) -> PackedWeight:
        return cls(kind, (num_rows, k), allocate(packed_bytes(kind, num_rows, k)))

    @classmethod
    def of_gguf(cls, raw: Tensor, ggml_type: int, shape: tuple[int, int]) -> PackedWeight:
        """A GGUF tensor's bytes as a packed weight of the same values.

        Raises:
            ValueError: no packed kind has them.
        """
        kind = packed_kind(ggml_type)
        if kind is None:
            raise ValueError(f"GGUF type {GGMLQuantizationType(ggml_type).name} has no packed kind")
        weight = cls.empty(kind, *shape)
        weight.fill(raw, ggml_type)
        return weight

    @classmethod
    def of_floats(cls, values: Tensor, kind: str) -> PackedWeight:
        """values [N, K] float32, float16 or bfloat16 rounded to bf16, or to int8 with a scale for each 32 (q8_0)."""
        weight = cls.empty(kind, *values.shape)
        weight.fill_floats(values)
        return weight

    def fill(self, raw: Tensor, ggml_type: int, first_row: int = 0, order: Tensor | None = None) -> None:
        """Write whole rows.

        Args:
            raw: uint8, contiguous, rows in the blocks of the GGUF type. May be a view of a mapped file.
            first_row: where the first goes.
            order: [n] int64: the rows to write, in this order; None: all.
        """
        k = self.shape[1]
        row_bytes = extension().source_bytes(ggml_type, k)
        if not row_bytes or raw.numel() % row_bytes or not raw.is_contiguous() or raw.dtype != torch.uint8:
            raise ValueError(f"{tuple(raw.shape)} {raw.dtype} is no rows of {k} values of GGUF type {ggml_type}")
        num_given = raw.numel() // row_bytes
        if order is not None:
            order = order.to(torch.int64).contiguous()
            if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < num_given:
                raise ValueError(f"order names rows outside 0..{num_given - 1}")
        num_rows = num_given if order is None else order.numel()
        if first_row < 0 or first_row + num_rows > self.shape[0]:
            raise ValueError(f"rows {first_row}..{first_row + num_rows - 1} do not fit in {self.shape[0]}")
        order_address = 0 if order is None else order.data_ptr()
        source = raw.data_ptr()
        extension().pack(ggml_type, self.kind, source, num_rows, k, order_address, self.data.data_ptr(), first_row)

    def fill_floats(self, values: Tensor, first_row: int = 0, order: Tensor | None = None) -> None:
        """The same from values [n, K] of a floating dtype; for kinds bf16 and q8_0."""
        if values.dim() != 2 or values.shape[1] != self.shape[1]:
            raise ValueError(f"expected [n, {self.shape[1]}], got {list(values.shape)}")
        self.fill(values.contiguous().view(torch.uint8), int(FLOATING[values.dtype]), first_row, order)

    def rows(self, ids: Tensor) -> Tensor:
        """ids [n] -> their values, [n, K] float32: an embedding's look-up."""
        ids = ids.to(torch.int64).contiguous()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]:
            raise ValueError(f"row ids must be in 0..{self.shape[0] - 1}")
        out = torch.empty(ids.numel(), self.shape[1])
        address = self.data.data_ptr()
        extension().unpack(self.kind, address, self.shape[1], ids.data_ptr(), ids.numel(), out.data_ptr())
        return out

    def dequantize(self) -> Tensor:
        """[N, K] float32"""
        return self.rows(torch.arange(self.shape[0]))

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


class PackedLinear:
    """y = x W^T + bias for weights side by side, perhaps of different kinds, in one call.

    Args:
        weights: [N_i, K] each; y has sum(N_i) columns. None is written to after this.
        bias: [sum(N_i)] float32, or None.
        terms: int8 terms of an activation, 1 or 2. Two keep about 15 bits: for the few products whose rounding shows
            most in the logits. They read the weights once, and compute twice.
    """

    def __init__(self, weights: Sequence[PackedWeight], bias: Tensor | None = None, terms: int = 1) -> None:
        self.weights = tuple(weights)
        self.k = self.weights[0].shape[1]
        self.n = sum(weight.shape[0] for weight in self.weights)
        self.terms = terms
        self.bias = None if bias is None else bias.float().contiguous()
        if any(weight.shape[1] != self.k for weight in self.weights):
            raise ValueError(f"weights of different K: {[weight.shape for weight in self.weights]}")
        if self.bias is not None and self.bias.shape != (self.n,):
            raise ValueError(f"bias must be [{self.n}], got {list(self.bias.shape)}")
        self._native = extension().Linear(self.k, self._parts(), terms)
        self.address: int = self._native.address()  # for calls that fuse more with the product

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [T, K] float32, rows contiguous -> [T, N] float32, in `out` if given."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.k or x.stride(1) != 1:
            raise ValueError(f"expected [T, {self.k}] float32 with contiguous rows, got {list(x.shape)} {x.dtype}")
        if out is None:
            out = torch.empty(x.shape[0], self.n)
        elif out.dtype != torch.float32 or out.shape != (x.shape[0], self.n) or out.stride(1) != 1:
            raise ValueError(f"out must be [{x.shape[0]}, {self.n}] float32, got {list(out.shape)} {out.dtype}")
        self._native.run(x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), out.stride(0))
        return out

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)

    def _parts(self) -> list[tuple[str, int, int, int]]:
        parts, column = [], 0
        for weight in self.weights:
            bias = 0 if self.bias is None else self.bias.data_ptr() + 4 * column
            parts.append((weight.kind, weight.data.data_ptr(), weight.shape[0], bias))
            column += weight.shape[0]
        return parts


# Plain twins


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] float32 -> int8 values [T, G, 32] and scales [T, G], K padded with zeros to G groups.

    The plain twin of what the extension does to activations; equal to it bit by bit.
    """
    groups = F.pad(x, (0, -x.shape[1] % 32)).view(x.shape[0], -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    used = (largest >= 1e-30) & largest.isfinite()
    values = torch.where(used, groups * torch.div(torch.full_like(largest, 127.0), largest), 0.0).round().to(torch.int8)
    scales = torch.where(used, largest / 127.0, torch.where(largest.isfinite(), 0.0, torch.nan))
    return values, scales.squeeze(-1)


def round_rows(x: Tensor, terms: int = 1) -> Tensor:
    """x [T, K] float32 as the extension multiplies it, [T, K] float64: the sum of its int8 terms."""
    values, scales = quantize_rows(x)
    first = (values.double() * scales.double().unsqueeze(-1)).flatten(1)[:, : x.shape[1]]
    if terms == 1:
        return first
    return first + round_rows(x - (values * scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]])


def quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, terms: int = 1) -> Tensor:
    """The plain twin of `PackedLinear` on quantised kinds: weight [N, K] float32, dequantised.

    Computed in float64; the extension's float32 sums over groups differ by rounding.
    """
    y = round_rows(x, terms) @ weight.double().T
    return (y if bias is None else y + bias.double()).float()
