"""The steps of a decoder layer, each in as few passes as its weights allow.

A linear layer is plain torch (`PlainLinear`) or packed (`packed.PackedLinear`). Packed ones run in the CPU extension,
one call a step; plain ones are composed of `forerun.kernels.reference`. Rows are bit-exact either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels import native, reference
from forerun.kernels.packed import PackedLinear, PackedWeight


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """y = x W^T + bias: weight [N, K], bias [N] or None, of the dtype of x."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        return reference.linear(x, self.weight, self.bias)


Linear = PlainLinear | PackedLinear
Embedding = Tensor | PackedWeight


def embed(token_ids: Tensor, weight: Embedding) -> Tensor:
    """token_ids [T] -> their rows of weight [V, H], a new tensor."""
    return weight.rows(token_ids) if isinstance(weight, PackedWeight) else weight[token_ids]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] scaled to unit root mean square, times weight [H]."""
    if not _is_native(x):
        return reference.rms_norm(x, weight, eps)
    num_rows, width = x.shape
    stride = _row_stride(x, width)
    out = torch.empty(num_rows, width)
    native.extension().norm(x.data_ptr(), stride, num_rows, width, _address(weight, width), eps, out.data_ptr(), width)
    return out


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, linear: Linear) -> Tensor:
    """x [T, K], RMS-normed, times the weights: [T, N]."""
    if isinstance(linear, PlainLinear):
        return linear(reference.rms_norm(x, norm_weight, eps))
    stride, num_rows = _row_stride(x, linear.k), x.shape[0]
    y = torch.empty(num_rows, linear.n)
    weight = _address(norm_weight, linear.k)
    native.extension().norm_linear(x.data_ptr(), stride, num_rows, weight, eps, linear.address, y.data_ptr(), linear.n)
    return y


def rope_qk(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """In place on the query and key heads: RMS norm of each head where a weight is given, then rope.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * D]: query, key and value heads side by side.
        cos, sin: [T, D / 2], of the rows' positions.
        q_norm, k_norm: [D], both or neither.
    """
    dim = 2 * cos.shape[1]
    if not _is_native(qkv):
        heads = qkv.view(qkv.shape[0], -1, dim)
        _rope_heads(heads[:, :num_heads], cos, sin, q_norm, eps)
        _rope_heads(heads[:, num_heads : num_heads + num_kv_heads], cos, sin, k_norm, eps)
        return
    stride, num_rows = _row_stride(qkv, (num_heads + 2 * num_kv_heads) * dim), qkv.shape[0]
    if cos.shape != (num_rows, dim // 2) or sin.shape != cos.shape:
        raise ValueError(f"cos and sin must be [{num_rows}, D / 2], got {list(cos.shape)} and {list(sin.shape)}")
    q_address, k_address = (0 if norm is None else _address(norm, dim) for norm in (q_norm, k_norm))
    native.extension().rope(
        qkv.data_ptr(), stride, num_rows, _address(cos), _address(sin), num_heads, num_kv_heads, dim,
        q_address, k_address, eps,
    )  # fmt: skip


def linear_add(x: Tensor, linear: Linear, residual: Tensor) -> None:
    """residual [T, N] += x [T, K] times the weights."""
    if isinstance(linear, PlainLinear):
        residual += linear(x)
        return
    stride, num_rows = _row_stride(x, linear.k), x.shape[0]
    to_stride = _row_stride(residual, linear.n)
    if residual.shape[0] != num_rows:
        raise ValueError(f"expected {num_rows} rows, got {residual.shape[0]}")
    native.extension().linear_add(x.data_ptr(), stride, num_rows, linear.address, residual.data_ptr(), to_stride)


def mlp(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Linear, down: Linear) -> None:
    """x [T, H] += down(silu(gate) * up), where gate and up are the halves of gate_up(normed x)."""
    if isinstance(gate_up, PlainLinear) or isinstance(down, PlainLinear):
        linear_add(reference.silu_mul(norm_linear(x, norm_weight, eps, gate_up)), down, x)
        return
    if gate_up.n != 2 * down.k or gate_up.k != down.n:
        raise ValueError(f"gate_up [{gate_up.n}, {gate_up.k}] and down [{down.n}, {down.k}] do not fit together")
    stride = _row_stride(x, gate_up.k)
    weight = _address(norm_weight, gate_up.k)
    native.extension().mlp(x.data_ptr(), stride, x.shape[0], weight, eps, gate_up.address, down.address)


def _rope_heads(heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> None:
    normed = heads if norm is None else reference.rms_norm(heads, norm, eps)
    heads.copy_(reference.rope(normed, cos, sin))


def _is_native(x: Tensor) -> bool:
    return native.available() and x.dtype == torch.float32 and x.is_cpu


def _row_stride(x: Tensor, width: int) -> int:
    """Floats from a row of x [T, width] to the next."""
    if x.dtype == torch.float32 and x.dim() == 2 and x.shape[1] == width:
        if x.is_contiguous():
            return width
        if x.stride(1) == 1:
            return x.stride(0)
    raise ValueError(f"expected [T, {width}] float32 with contiguous rows, got {list(x.shape)} {x.dtype}")


def _address(x: Tensor, size: int | None = None) -> int:
    if x.dtype != torch.float32 or not x.is_contiguous() or (size is not None and x.numel() != size):
        raise ValueError(f"expected {size or ''} contiguous float32 values, got {list(x.shape)} {x.dtype}")
    return x.data_ptr()
