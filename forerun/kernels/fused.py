"""The steps of a decoder layer, each in as few passes as its weights allow.

A linear layer is plain torch (`PlainLinear`) or packed (`packed.PackedLinear`). Packed ones run in the CPU extension,
one call a step; plain ones are composed of `forerun.kernels.reference`, or on a GPU of cuBLAS and `triton_ops`. On a
CPU rows are bit-exact either way, on a GPU where a linear is `invariant`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import cuda, native, reference
from forerun.kernels.packed import PackedLinear, PackedWeight


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """y = x W^T + bias: weight [N, K], bias [N] or None, of the dtype of x.

    Attributes:
        invariant: on a GPU too a row's bits must not depend on the other rows of a call; needs Triton there.
    """

    weight: Tensor
    bias: Tensor | None = None
    invariant: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]"""
        if not x.is_cuda:
            return reference.linear(x, self.weight, self.bias)
        if self.invariant:
            return cuda.product_ops().linear(x, self.weight, self.bias)  # type: ignore[no-any-return]
        return F.linear(x, self.weight, self.bias)

    def add_on_gpu(self, x: Tensor, residual: Tensor, scale: float) -> bool:
        """residual [T, N] += scale * y in one launch, if there is a kernel for that: whether there is."""
        if not x.is_cuda:
            return False
        if self.invariant:
            cuda.product_ops().linear(x, self.weight, self.bias, residual, scale)
            return True
        if self.bias is None:  # cuBLAS adds as it writes
            residual.addmm_(x, self.weight.t(), alpha=scale)
            return True
        return False


Linear = PlainLinear | PackedLinear
Embedding = Tensor | PackedWeight


def embed(token_ids: Tensor, weight: Embedding) -> Tensor:
    """token_ids [T] -> their rows of weight [V, H], a new tensor."""
    return weight.rows(token_ids) if isinstance(weight, PackedWeight) else weight[token_ids]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] scaled to unit root mean square, times weight [H]."""
    if cuda.serves(x):
        return cuda.ops().rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    if not _is_native(x):
        return reference.rms_norm(x, weight, eps)
    num_rows, width = x.shape
    stride = _row_stride(x, width)
    out = torch.empty(num_rows, width)
    native.extension().norm(x.data_ptr(), stride, num_rows, width, _address(weight, width), eps, out.data_ptr(), width)
    return out


def norm_linear(x: Tensor, norm_weight: Tensor | None, eps: float, linear: Linear) -> Tensor:
    """x [T, K], RMS-normed where there is a norm, times the weights: [T, N]."""
    if isinstance(linear, PlainLinear):
        return linear(_normed(x, norm_weight, eps))
    stride, num_rows = _row_stride(x, linear.k), x.shape[0]
    y = torch.empty(num_rows, linear.n)
    weight = _optional_address(norm_weight, linear.k)
    native.extension().norm_linear(x.data_ptr(), stride, num_rows, weight, eps, linear.address, y.data_ptr(), linear.n)
    return y


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2I] -> [T, I], see `reference.gated`."""
    if cuda.serves(gate_up):
        return cuda.ops().gated(gate_up, activation)  # type: ignore[no-any-return]
    return reference.gated(gate_up, activation)


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
    """In place on the query and key heads: RMS norm where a weight is given, then rope.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * D]: query, key and value heads side by side.
        cos, sin: [T, R / 2], of the rows' positions; the first R values of a head are rotated, R <= D.
        q_norm, k_norm: both or neither: [D] for a norm of each head, or of all heads of a row together
            [num_heads * D] and [num_kv_heads * D].
    """
    dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    whole = q_norm is not None and q_norm.numel() != dim
    if cuda.serves(qkv):
        cuda.ops().rope_qk(qkv, cos, sin, num_heads, num_kv_heads, q_norm, k_norm, eps)
        return
    if not _is_native(qkv):
        heads = qkv.view(qkv.shape[0], -1, dim)
        _rope_heads(heads[:, :num_heads], cos, sin, q_norm, eps)
        _rope_heads(heads[:, num_heads : num_heads + num_kv_heads], cos, sin, k_norm, eps)
        return
    stride, num_rows = _row_stride(qkv, (num_heads + 2 * num_kv_heads) * dim), qkv.shape[0]
    half = cos.shape[-1]
    if cos.shape != (num_rows, half) or sin.shape != cos.shape or 2 * half > dim:
        raise ValueError(f"cos and sin must be [{num_rows}, D / 2], got {list(cos.shape)} and {list(sin.shape)}")
    q_address = _optional_address(q_norm, num_heads * dim if whole else dim)
    k_address = _optional_address(k_norm, num_kv_heads * dim if whole else dim)
    native.extension().rope(
        qkv.data_ptr(), stride, num_rows, _address(cos), _address(sin), half, num_heads, num_kv_heads, dim,
        q_address, k_address, whole, eps,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Merge:
    """How what a layer makes joins the residual stream: residual += scale * norm(made).

    Attributes:
        norm: [H], weight of an RMS norm; None: none.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    scale: float = 1.0

    def __call__(self, made: Tensor, residual: Tensor) -> None:
        """Both [T, H]; in place on the residual."""
        normed = made if self.norm is None else rms_norm(made, self.norm, self.eps)
        residual += normed if self.scale == 1 else normed * self.scale

    def arguments(self, width: int) -> tuple[int, float, float]:
        """As the extension takes it."""
        return _optional_address(self.norm, width), self.eps, self.scale


ADD = Merge()


def linear_add(x: Tensor, linear: Linear, residual: Tensor, merge: Merge = ADD) -> None:
    """x [T, K] times the weights, merged into residual [T, N]."""
    if isinstance(linear, PlainLinear):
        if merge.norm is not None or not linear.add_on_gpu(x, residual, merge.scale):
            merge(linear(x), residual)
        return
    stride, num_rows = _row_stride(x, linear.k), x.shape[0]
    to_stride = _row_stride(residual, linear.n)
    if residual.shape[0] != num_rows:
        raise ValueError(f"expected {num_rows} rows, got {residual.shape[0]}")
    native.extension().linear_add(
        x.data_ptr(), stride, num_rows, linear.address, *merge.arguments(linear.n), residual.data_ptr(), to_stride
    )


@dataclass(frozen=True, slots=True)
class Mlp:
    """x -> down(activation(gate) * up), where gate and up are the halves of gate_up(x).

    Attributes:
        gate_up: [2I, H]. down: [H, I].
        activation: a name that `reference.gated` knows.
    """

    gate_up: Linear
    down: Linear
    activation: str = "silu"

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def add(self, x: Tensor, norm: Tensor | None, eps: float, residual: Tensor, merge: Merge = ADD) -> None:
        """Of x [T, H], RMS-normed where there is a norm, merged into residual [T, H], which may be x itself."""
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, PlainLinear) or isinstance(down, PlainLinear):
            linear_add(gated(norm_linear(x, norm, eps, gate_up), self.activation), down, residual, merge)
            return
        if gate_up.n != 2 * down.k or gate_up.k != down.n:
            raise ValueError(f"gate_up [{gate_up.n}, {gate_up.k}] and down [{down.n}, {down.k}] do not fit together")
        stride, to_stride = _row_stride(x, gate_up.k), _row_stride(residual, down.n)
        if residual.shape[0] != x.shape[0]:
            raise ValueError(f"expected {x.shape[0]} rows, got {residual.shape[0]}")
        native.extension().mlp(
            x.data_ptr(), stride, x.shape[0], _optional_address(norm, gate_up.k), eps, gate_up.address,
            self.activation == "gelu_tanh", down.address, *merge.arguments(down.n), residual.data_ptr(), to_stride,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Experts:
    """A choice of MLPs: each row goes through those that the router scores highest, weighted.

    The outputs of a row's experts are added in the order of the experts, so that its bits are its own.

    Attributes:
        router: [E, H], to scores. experts: E of them.
        num_chosen, normalize: as `reference.route` takes them.
    """

    router: Linear
    experts: Sequence[Mlp]
    num_chosen: int
    normalize: bool

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.router, *(linear for expert in self.experts for linear in expert.linears)

    def add(self, x: Tensor, norm: Tensor | None, eps: float, residual: Tensor, merge: Merge = ADD) -> None:
        """As `Mlp.add`."""
        normed = x if norm is None else rms_norm(x, norm, eps)
        chosen, weights = reference.route(self.router(normed).float(), self.num_chosen, self.normalize)
        weights = weights.to(x.dtype)
        total = torch.zeros_like(residual)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == expert)
            made = x.new_zeros(len(rows), residual.shape[1])
            self.experts[expert].add(normed[rows], None, eps, made)
            total[rows] += made * weights[rows, places].unsqueeze(1)
        merge(total, residual)


def _rope_heads(heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> None:
    """heads [T, n, D]"""
    normed = heads
    if norm is not None:
        normed = reference.rms_norm(heads.reshape(heads.shape[0], -1, norm.numel()), norm, eps).view(heads.shape)
    heads.copy_(reference.rope(normed, cos, sin))


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return rms_norm(x, weight, eps) if x.is_cuda else reference.rms_norm(x, weight, eps)


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


def _optional_address(x: Tensor | None, size: int) -> int:
    return 0 if x is None else _address(x, size)


def _address(x: Tensor, size: int | None = None) -> int:
    if x.dtype != torch.float32 or not x.is_contiguous() or (size is not None and x.numel() != size):
        raise ValueError(f"expected {size or ''} contiguous float32 values, got {list(x.shape)} {x.dtype}")
    return x.data_ptr()
