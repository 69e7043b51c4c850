"""The Triton kernels of a layer against their plain twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from forerun.kernels import fused, reference

pytest.importorskip("triton")
from forerun.kernels import triton_ops

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 4096), (2, 5000)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.randn(rows, 2 * width, device=device, dtype=dtype)
    weight = torch.rand(width, device=device, dtype=dtype)
    for x in (wide[:, :width], wide[:, width:]):
        assert_near(triton_ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (7, 1024), (3, 1500)])
def test_gated(rows: int, width: int, activation: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = 3 * torch.randn(rows, 2 * width, device=device, dtype=dtype)
    assert_near(triton_ops.gated(gate_up, activation), reference.gated(gate_up.float(), activation).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [None, "head", "row"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"),
    [(8, 2, 128, 128), (14, 2, 64, 64), (4, 4, 24, 24), (0, 2, 32, 16), (6, 1, 24, 12)],
)
def test_rope_qk(
    heads: int, kv_heads: int, dim: int, rotated: int, norm: str | None, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    rows = 3
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    angles = torch.rand(rows, rotated // 2, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    sizes = {"head": (dim, dim), "row": (heads * dim or kv_heads * dim, kv_heads * dim)}.get(norm or "")
    norms = [torch.rand(size, device=device, dtype=dtype) for size in sizes] if sizes else [None, None]
    expected = qkv.float()
    views = expected.view(rows, -1, dim)
    for part, weight in ((views[:, :heads], norms[0]), (views[:, heads : heads + kv_heads], norms[1])):
        if part.shape[1]:
            fused._rope_heads(part, cos.float(), sin.float(), None if weight is None else weight.float(), 1e-6)
    stored = qkv.clone()
    triton_ops.rope_qk(qkv, cos, sin, heads, kv_heads, *norms, 1e-6)
    assert_near(qkv, expected.to(dtype))
    assert_stores(stored, qkv, heads, kv_heads, lambda *place: triton_ops.rope_qk(
        stored, cos, sin, heads, kv_heads, *norms, 1e-6, place
    ))  # fmt: skip


def test_heads_that_need_no_rope_are_stored(device: torch.device) -> None:
    product = torch.randn(3, (4 + 2 * 2) * 24, device=device)
    assert_stores(product, product.clone(), 4, 2, lambda *place: triton_ops.rope_qk(
        product, *product.new_empty(2, 3, 0), 4, 2, None, None, 0.0, place
    ))  # fmt: skip


def assert_stores(
    product: torch.Tensor, turned: torch.Tensor, heads: int, kv_heads: int, store: Callable[..., None]
) -> None:
    """Queries of the product [3, N] as those of `turned`, keys and values in a cache, the second row's nowhere."""
    dim = turned.shape[1] // (heads + 2 * kv_heads)
    cache = turned.new_zeros(5, 2, kv_heads, 4, dim).transpose(2, 3)
    slots = torch.tensor([9, -1, 16], dtype=torch.int32, device=turned.device)
    store(cache, slots)
    parts = turned.view(3, -1, dim)
    query, pairs = parts[:, :heads], parts[:, heads:].unflatten(1, (2, kv_heads))
    assert torch.equal(product.view(3, -1, dim)[::2, :heads], query[::2])
    expected = torch.zeros_like(cache)
    expected[2, :, 1], expected[4, :, 0] = pairs[0], pairs[2]
    assert torch.equal(cache, expected)
