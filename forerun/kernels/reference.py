"""Plain torch kernels whose rows are bit-exact: a row's result does not depend on which rows share the call.

torch picks other code for other numbers of rows, and for the tail of a vector, so two rules hold here:

- A product is always made of calls of one shape: `ROW_TILE` rows, zero rows added. It costs a lone row what ROW_TILE
  rows cost, about twice a bare matrix-vector product, and is what makes the text independent of drafts and of company.
- Of the transcendental functions only exp, log and tanh are used. torch computes them with one vector routine, tail
  included; its silu, sigmoid and gelu end in scalar code that gives other bits.

Not for speed: the native kernels do the same work in fewer passes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 8


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


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], gate first: silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head: x [T, heads, D], cos and sin [T, D / 2] of each row's position."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
