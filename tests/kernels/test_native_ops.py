"""The native steps of a layer against their plain twins, and the exactness of their rows on every instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.kernels import fused, native, reference
from forerun.kernels.packed import PackedLinear, PackedWeight, quantized_linear

pytestmark = pytest.mark.skipif(not native.available(), reason="the CPU extension is not built")

ISAS = native.isas() if native.available() else []
KINDS = [("q8_0",), ("bf16",), ("q8_0", "bf16")]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.use(isa=request.param):
        yield request.param


def packed(n: int, k: int, kinds: tuple[str, ...] = ("q8_0",), bias: bool = True, terms: int = 1) -> PackedLinear:
    """n outputs shared out among the kinds."""
    share = n // len(kinds)
    sizes = [*[share] * (len(kinds) - 1), n - share * (len(kinds) - 1)]
    weights = [
        PackedWeight.of_floats(torch.randn(size, k) * k**-0.5, kind) for size, kind in zip(sizes, kinds, strict=True)
    ]
    return PackedLinear(weights, torch.randn(n) if bias else None, terms)


def twin(x: Tensor, linear: PackedLinear) -> Tensor:
    """What the product should be, in float64 where it matters."""
    columns = []
    for weight in linear.weights:
        values = weight.dequantize()
        exact = weight.kind == "bf16"
        columns.append(
            (x.double() @ values.double().T).float() if exact else quantized_linear(x, values, terms=linear.terms)
        )
    y = torch.cat(columns, 1)
    return y if linear.bias is None else y + linear.bias


def all_isas(function: Callable[[], Tensor]) -> Tensor:
    """The result, the same bits on all instruction sets and with any threads."""
    results = []
    for isa, threads in itertools.product(ISAS, (1, 2, 4)):
        with native.use(isa=isa, num_threads=threads):
            results.append(function())
    for result in results[1:]:
        assert torch.equal(result, results[0])
    return results[0]


def assert_rows_exact(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Rows of x alone, in company, at any place: as in all of x, which has the same bits everywhere."""
    expected = all_isas(lambda: function(x))
    for threads in (1, 3):
        with native.use(num_threads=threads):
            for count in range(1, len(x) + 1):
                start = count * 7 % (len(x) - count + 1)
                assert torch.equal(function(x[start : start + count]), expected[start : start + count]), (start, count)
            order = torch.randperm(len(x))
            assert torch.equal(function(x[order]), expected[order])


def changed(operation: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    """An operation in place as a function."""

    def function(x: Tensor) -> Tensor:
        x = x.clone()
        operation(x)
        return x

    return function


def test_exponential_is_within_one_ulp(isa: str) -> None:
    x = torch.cat([torch.linspace(-86.5, 88.7, 400_001), torch.randn(100_000) * 3, torch.tensor([0.0, -0.0, 1e-30])])
    out = torch.empty_like(x)
    native.extension().exponential(x.data_ptr(), x.numel(), out.data_ptr())
    exact = np.exp(x.double().numpy())
    ulps = np.abs(out.double().numpy() - exact) / np.spacing(exact.astype(np.float32))
    assert ulps.max() < 1.0
    assert out[-3:].tolist() == [1.0, 1.0, 1.0]


def test_exponential_of_extremes(isa: str) -> None:
    x = torch.tensor([float("-inf"), -1e30, -88.0, 89.0, 1e30, float("inf"), float("nan")])
    out = torch.empty_like(x)
    native.extension().exponential(x.data_ptr(), x.numel(), out.data_ptr())
    infinity = float("inf")
    assert out[:6].tolist() == [0, 0, 0, infinity, infinity, infinity]
    assert out[6].isnan()


def test_exponential_has_the_same_bits_everywhere() -> None:
    x = torch.randn(100_003) * 30

    def exponential(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        native.extension().exponential(x.data_ptr(), x.numel(), out.data_ptr())
        return out

    whole = all_isas(lambda: exponential(x))
    for count in range(1, 40):
        assert torch.equal(exponential(x[5 : 5 + count]), whole[5 : 5 + count])


@pytest.mark.parametrize("width", [1, 7, 16, 24, 64, 576, 900])
def test_rms_norm(width: int) -> None:
    x, weight = torch.randn(70, width), torch.randn(width)
    torch.testing.assert_close(fused.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), rtol=1e-6, atol=1e-6)
    assert_rows_exact(lambda rows: fused.rms_norm(rows, weight, EPS), x)


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (48, 576), (75, 100)])
@pytest.mark.parametrize("terms", [1, 2])
def test_norm_linear(n: int, k: int, kinds: tuple[str, ...], terms: int) -> None:
    x, weight, linear = torch.randn(70, k), torch.randn(k), packed(n, k, kinds, terms=terms)
    y = fused.norm_linear(x, weight, EPS, linear)
    assert torch.equal(y, linear(fused.rms_norm(x, weight, EPS)))
    torch.testing.assert_close(y, twin(fused.rms_norm(x, weight, EPS), linear), rtol=1e-4, atol=1e-4)
    assert_rows_exact(lambda rows: fused.norm_linear(rows, weight, EPS, linear), x)


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize("terms", [1, 2])
def test_linear_add(kinds: tuple[str, ...], terms: int) -> None:
    k, n = 100, 75
    both, linear = torch.randn(70, k + n), packed(n, k, kinds, terms=terms)

    def add(rows: Tensor) -> Tensor:  # a row holds its x and its residual
        rows = rows.clone()
        fused.linear_add(rows[:, :k], linear, rows[:, k:])
        return rows[:, k:]

    assert torch.equal(add(both), both[:, k:] + linear(both[:, :k].contiguous()))
    assert_rows_exact(add, both)


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize(("hidden", "middle"), [(64, 96), (100, 72), (576, 160)])
def test_mlp(hidden: int, middle: int, kinds: tuple[str, ...]) -> None:
    gate_up, down = packed(2 * middle, hidden, kinds), packed(hidden, middle, kinds, bias=False)
    x, weight = torch.randn(70, hidden), torch.randn(hidden)

    def mlp(rows: Tensor) -> None:
        fused.mlp(rows, weight, EPS, gate_up, down)

    inner = reference.silu_mul(fused.norm_linear(x, weight, EPS, gate_up))
    # one step of an int8 activation, where silu's last bit decides how it rounds
    torch.testing.assert_close(changed(mlp)(x), x + twin(inner, down), rtol=1e-3, atol=2e-2)
    assert (changed(mlp)(x) - x - twin(inner, down)).abs().mean() < 1e-4
    assert_rows_exact(changed(mlp), x)


def test_mlp_of_more_rows_than_it_takes_at_once() -> None:
    gate_up, down = packed(96, 64), packed(64, 48)
    x, weight = torch.randn(300, 64), torch.randn(64)
    mlp = changed(lambda rows: fused.mlp(rows, weight, EPS, gate_up, down))
    pieces = torch.cat([mlp(part) for part in x.split(70)])
    assert torch.equal(mlp(x), pieces)


def test_mlp_with_one_packed_matrix() -> None:
    x, weight = torch.randn(9, 64), torch.randn(64)
    gate_up, down = packed(96, 64, ("bf16",)), packed(64, 48, ("bf16",))
    plain = fused.PlainLinear(down.weights[0].dequantize(), down.bias)
    got = changed(lambda rows: fused.mlp(rows, weight, EPS, gate_up, plain))(x)
    torch.testing.assert_close(got, changed(lambda rows: fused.mlp(rows, weight, EPS, gate_up, down))(x))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
def test_rope_qk(dim: int, norms: bool) -> None:
    heads, kv_heads = 6, 2
    angles = torch.randn(70, dim // 2) * 3
    tables = torch.cat([angles.cos(), angles.sin()], 1)
    rows = torch.cat([torch.randn(70, (heads + 2 * kv_heads) * dim), tables], 1)
    weights = (torch.randn(dim), torch.randn(dim), EPS) if norms else ()

    def rope(rows: Tensor) -> Tensor:
        qkv = rows[:, :-dim].clone()
        cos, sin = rows[:, -dim:].chunk(2, 1)
        fused.rope_qk(qkv, cos.contiguous(), sin.contiguous(), heads, kv_heads, *weights)
        return qkv

    def plain(rows: Tensor) -> Tensor:
        qkv = rows[:, :-dim].double()
        cos, sin = rows[:, -dim:].double().chunk(2, 1)
        fused.rope_qk(qkv, cos, sin, heads, kv_heads, *weights)  # double: the twin
        return qkv.float()

    torch.testing.assert_close(rope(rows), plain(rows), rtol=1e-5, atol=1e-5)
    assert_rows_exact(rope, rows)


def test_rope_without_norms_has_the_bits_of_its_twin() -> None:
    qkv, angles = torch.randn(20, 10 * 64), torch.randn(20, 32)
    cos, sin = angles.cos(), angles.sin()
    expected = reference.rope(qkv.view(20, 10, 64)[:, :8], cos, sin)
    fused.rope_qk(qkv, cos, sin, 6, 2)
    assert torch.equal(qkv.view(20, 10, 64)[:, :8], expected)


def test_embed() -> None:
    values = torch.randn(50, 64).bfloat16()
    weight = PackedWeight.of_floats(values, "bf16")
    ids = torch.tensor([3, 49, 3, 0])
    assert torch.equal(fused.embed(ids, weight), values[ids].float())
    with pytest.raises(ValueError, match="row ids"):
        fused.embed(torch.tensor([50]), weight)


def test_no_rows_give_no_rows() -> None:
    nothing, weight, linear = torch.empty(0, 64), torch.randn(64), packed(64, 64)
    assert fused.norm_linear(nothing, weight, EPS, linear).shape == (0, 64)
    assert fused.rms_norm(nothing, weight, EPS).shape == (0, 64)
    fused.linear_add(nothing, linear, torch.empty(0, 64))
    fused.mlp(nothing, weight, EPS, packed(128, 64), linear)


def test_a_row_that_is_not_finite_stays_by_itself(isa: str) -> None:
    gate_up, down = packed(96, 64), packed(64, 48)
    x, weight = torch.randn(9, 64), torch.randn(64)
    mlp = changed(lambda rows: fused.mlp(rows, weight, EPS, gate_up, down))
    expected = mlp(x)
    x[4, 10] = float("nan")
    got = mlp(x)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[others], expected[others])
    assert got[4].isnan().all()


@pytest.mark.parametrize("wrong", [torch.randn(4, 63), torch.randn(4, 64).double(), torch.randn(64, 4).T])
def test_wrong_shapes_are_refused(wrong: Tensor) -> None:
    linear, weight = packed(64, 64), torch.randn(64)
    with pytest.raises(ValueError, match="expected"):
        fused.norm_linear(wrong, weight, EPS, linear)
    with pytest.raises(ValueError, match="expected"):
        fused.linear_add(wrong, linear, torch.randn(4, 64))
    with pytest.raises(ValueError, match="expected 4 rows"):
        fused.linear_add(torch.randn(4, 64), linear, torch.randn(3, 64))
    with pytest.raises(ValueError, match="expected 64 contiguous"):
        fused.norm_linear(torch.randn(4, 64), torch.randn(63), EPS, linear)
