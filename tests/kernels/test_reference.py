"""Rows are bit-exact: a row's result is the same alone, in company, and at any place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import check_row_exactness, gated, linear, rms_norm, rope
from forerun.kernels.reference import route, soft_cap

SHAPES = [(576, 1536), (64, 96), (96, 64), (100, 31), (1536, 576), (896, 1024)]


@pytest.fixture(params=[1, 2], ids=["1_thread", "2_threads"], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_rows_exact(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    full = function(x)
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17):
        for start in (0, 1, 6, 13):
            assert torch.equal(function(x[start : start + count]), full[start : start + count]), (start, count)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
    assert torch.equal(function(x[order]), full[order])


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_linear(inner: int, outer: int) -> None:
    weight, bias, x = torch.randn(outer, inner), torch.randn(outer), torch.randn(40, inner)
    assert_rows_exact(lambda rows: linear(rows, weight, bias), x)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [64, 96, 100, 31, 1536])
def test_elementwise(width: int) -> None:
    x, weight = torch.randn(40, 2 * width), torch.randn(2 * width)
    for activation in ("silu", "gelu_tanh"):
        assert_rows_exact(lambda rows, activation=activation: gated(rows, activation), x)
    assert_rows_exact(lambda rows: soft_cap(rows, 1.7), x)
    for normalize in (True, False):
        assert_rows_exact(lambda rows, normalize=normalize: route(rows, 3, normalize)[1], x)
    assert_rows_exact(lambda rows: rms_norm(rows, weight, 1e-5), x)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(gated(x, "silu"), F.silu(gate) * up)
    torch.testing.assert_close(gated(x, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (2 * width,), weight, 1e-5))


def test_rope_rotates_halves() -> None:
    x, angle = torch.randn(40, 3, 8), torch.randn(40, 4)
    turned = rope(x, angle.cos(), angle.sin())
    first, second = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)), torch.polar(torch.ones(40, 4), angle)
    expected = first * second.unsqueeze(1)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_of_large_values_are_finite(activation: str) -> None:
    x = torch.tensor([[-200.0, 200.0, 0.0, -1e30, 1.0, 1.0, 1.0, 1.0]])
    assert gated(x, activation).tolist() == [[0.0, 200.0, 0.0, 0.0]]


def test_routes_go_to_the_best_experts_the_first_among_equals() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    indices, weights = route(scores, 2, normalize=True)
    assert indices.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    _, weights = route(scores, 2, normalize=False)
    torch.testing.assert_close(weights, scores.softmax(-1).sort(descending=True).values[:, :2])


def test_the_start_up_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_row_exactness([(96, 64)])
    real = F.linear
    nudge = torch.zeros(8, 1)
    nudge[5] = 1e-6
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: real(x, w, b) + nudge)
    assert not check_row_exactness([(96, 64)])
