"""Plain torch kernels whose rows are bit-exact: a row's result does not depend on which rows share the call.

torch picks other code for other numbers of rows, and for the tail of a vector, so two rules hold here:

- A product is always made of calls of one shape: `ROW_TILE` rows, zero rows added. It costs a lone row what ROW_TILE
  rows cost, about twice a bare matrix-vector product, and is what makes the text independent of drafts and of company.
- Of the transcendental functions only exp, log and tanh are used. torch computes them with one vector routine, tail
  included; its silu, sigmoid and gelu end in scalar code that gives other bits.

Not for speed: the native kernels do the same work in fewer passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 8
GELU_SLOPE, GELU_CUBIC = math.sqrt(8 / math.pi), 0.044715


def pad_rows(x: Tensor) -> Tensor:
    """[T, ...] -> [T rounded up to ROW_TILE, ...], zeros added."""
    missing = -x.shape[0] % ROW_TILE
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
    num_rows = x.shape[0]
    if num_rows == ROW_TILE:
        return F.linear(x, weight, bias)
    padded = pad_rows(x)
    out = x.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, padded.shape[0], ROW_TILE):
        out[start : start + ROW_TILE] = F.linear(padded[start : start + ROW_TILE], weight, bias)
    return out[:num_rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] scaled to unit root mean square over its last axis, times weight [H]; computed in float32."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * weight


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2I], gate first: activation(gate) * up, [T, I].

    Both activations are gate * sigmoid(z): "silu" with z = gate, "gelu_tanh" (the approximation of GELU by tanh) with
    z = sqrt(8 / pi) (gate + 0.044715 gate^3), since (1 + tanh(z / 2)) / 2 is sigmoid(z).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    z = gate if activation == "silu" else GELU_SLOPE * gate * (1 + GELU_CUBIC * (gate * gate))
    return gate / (1 + torch.exp(-z)) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head: x [T, heads, D], cos and sin [T, R / 2] of each row's position. Where R < D the
    first R values of a head are rotated and the others stay."""
    half = cos.shape[-1]
    first, second, rest = x.split_with_sizes((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)"""
    return torch.tanh(x / cap) * cap


def route(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The best experts of each row.

    Args:
        scores: [T, E] float32, the router's.
        normalize: the weights of a row add up to 1; otherwise they are the softmax over all experts.
    Returns:
        indices [T, num_chosen] int64, the lowest first among equals, and weights [T, num_chosen] float32.
    """
    ordered, indices = scores.sort(dim=-1, descending=True, stable=True)
    weights = torch.exp(ordered - ordered[:, :1])
    chosen = weights[:, :num_chosen]
    return indices[:, :num_chosen], chosen / _row_sums(chosen if normalize else weights)


def _row_sums(x: Tensor) -> Tensor:
    """[T, E] -> [T, 1], by halves: in one order for any T, as torch's own sum on a GPU is not."""
    x = F.pad(x, (0, (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]))
    while x.shape[1] > 1:
        first, second = x.chunk(2, dim=1)
        x = first + second
    return x


def check_row_exactness(weight_shapes: Iterable[tuple[int, int]]) -> bool:
    """Whether a row's product has the same bits at every place of a tile and beside any other rows.

    Args:
        weight_shapes: (N, K) of the weights in use.
    """
    generator = torch.Generator().manual_seed(0)
    for shape in weight_shapes:
        weight = torch.randn(shape, generator=generator)
        x = torch.randn(ROW_TILE, shape[1], generator=generator)
        expected = F.linear(x, weight)
        for place in range(ROW_TILE):
            alone = torch.zeros_like(x)
            alone[place] = x[0]
            if not torch.equal(F.linear(alone, weight)[place], expected[0]):
                return False
    return True
