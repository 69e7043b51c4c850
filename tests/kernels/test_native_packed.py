"""Packed weights have the values of the file, whichever way they get there."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.kernels import native

if not native.available():
    pytest.skip("the CPU extension is not built", allow_module_level=True)

from forerun.kernels.packed import PackedLinear, PackedWeight, packed_kind
from tests.kernels.native_cases import TYPES, gguf_rows, packed, values_of


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("n", [1, 16, 37])
def test_a_packed_weight_has_exactly_the_values_that_gguf_reads(ggml_type: GGMLQuantizationType, n: int) -> None:
    raw = gguf_rows(ggml_type, n, 512)
    assert torch.equal(PackedWeight.of_gguf(raw, ggml_type, (n, 512)).dequantize(), values_of(raw, ggml_type))


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_every_bit_pattern_of_a_block_packs_exactly(ggml_type: GGMLQuantizationType) -> None:
    shape = gguf_rows(ggml_type, 64, 256).shape
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    expected = values_of(raw, ggml_type)
    found = PackedWeight.of_gguf(raw, ggml_type, (64, 256)).dequantize()
    finite = expected.isfinite()
    assert torch.equal(found[finite], expected[finite])
    assert not found[~finite].isfinite().any()


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_one_hot_rows_multiply_out_the_values(ggml_type: GGMLQuantizationType) -> None:
    raw = gguf_rows(ggml_type, 20, 256)
    one_hot = torch.eye(256) * 127  # scale 1, so that nothing is rounded but the product
    y = PackedLinear([PackedWeight.of_gguf(raw, ggml_type, (20, 256))])(one_hot)
    # the offset or minimum is added apart: two roundings, of terms no larger than the largest value
    largest = values_of(raw, ggml_type).abs().max().item()
    torch.testing.assert_close(y.T / 127, values_of(raw, ggml_type), rtol=0, atol=4 * 2**-24 * 2 * largest)


def test_rows_in_another_order_and_place_are_those_rows() -> None:
    first, second = gguf_rows(GGMLQuantizationType.Q4_0, 24, 64), gguf_rows(GGMLQuantizationType.Q4_0, 11, 64, seed=5)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    weight = PackedWeight.empty("q4_0", 40, 64)
    weight.fill(first, GGMLQuantizationType.Q4_0, first_row=3, order=order)
    weight.fill(second, GGMLQuantizationType.Q4_0, first_row=27)
    values = weight.dequantize()
    assert torch.equal(values[3:27], values_of(first, GGMLQuantizationType.Q4_0)[order])
    assert torch.equal(values[27:38], values_of(second, GGMLQuantizationType.Q4_0))
    assert not values[:3].any()
    assert not values[38:].any()


def test_rows_looked_up_are_the_dequantised_rows() -> None:
    weight = packed(GGMLQuantizationType.Q6_K, 100, 256)
    ids = torch.tensor([99, 0, 5, 5, 17, 31, 2, 64, 80, 3, 98])
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])
    assert weight.rows(ids[:0]).shape == (0, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_become_bf16_as_torch_rounds_them(dtype: torch.dtype) -> None:
    values = torch.randn(19, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(PackedWeight.of_floats(values, "bf16").dequantize(), values.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [64, 96, 40])
def test_floats_become_int8_within_half_a_step(dtype: torch.dtype, k: int) -> None:
    values = torch.randn(19, k, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = PackedWeight.of_floats(values, "q8_0").dequantize()
    padded = torch.nn.functional.pad(values.float(), (0, -k % 32)).view(19, -1, 32)
    step = (padded.abs().amax(-1, keepdim=True) / 127).expand_as(padded).reshape(19, -1)[:, :k]
    # half a step, and the scale's own rounding to 11 bits on a value of up to 127 steps
    assert ((found - values.float()).abs() <= step * (0.5 + 127 * 2**-11)).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_scales_are_rounded_to_half_as_torch_rounds(numbers: list[float]) -> None:
    values = torch.tensor(numbers).view(-1, 1)
    scales = (values.abs() / 127).half()
    weight = PackedWeight.of_floats(values, "q8_0")
    stored = weight.data.view(torch.float16).view(-1, 1088 // 2)[:, :16].reshape(-1)[: len(numbers)]
    assert torch.equal(stored, scales.squeeze(1))


@pytest.mark.parametrize(
    ("raw", "first_row", "order"),
    [
        (torch.zeros(17, dtype=torch.uint8), 0, None),
        (torch.zeros(36 * 4, dtype=torch.int8), 0, None),
        (torch.zeros(36 * 4, dtype=torch.uint8), 1, None),
        (torch.zeros(36 * 4, dtype=torch.uint8), -1, None),
        (torch.zeros(36 * 4, dtype=torch.uint8), 0, torch.tensor([4])),
        (torch.zeros(36 * 4, dtype=torch.uint8), 0, torch.tensor([-1])),
    ],
    ids=["size", "dtype", "past the end", "before the start", "order past the end", "order before the start"],
)
def test_rows_that_do_not_fit_are_refused(raw: torch.Tensor, first_row: int, order: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match="rows"):
        PackedWeight.empty("q4_0", 4, 64).fill(raw, GGMLQuantizationType.Q4_0, first_row, order)


def test_types_without_a_packed_kind_say_so() -> None:
    assert packed_kind(GGMLQuantizationType.Q2_K) is None
    with pytest.raises(ValueError, match="Q2_K"):
        PackedWeight.of_gguf(torch.zeros(84, dtype=torch.uint8), GGMLQuantizationType.Q2_K, (1, 256))
    with pytest.raises(ValueError, match="cannot become"):
        PackedWeight.empty("q4_0", 1, 64).fill(torch.zeros(68, dtype=torch.uint8), GGMLQuantizationType.Q8_0)


def test_row_ids_outside_the_matrix_are_refused() -> None:
    weight = packed(GGMLQuantizationType.Q8_0, 10, 64)
    for bad in (10, -1):
        with pytest.raises(ValueError, match="row ids"):
            weight.rows(torch.tensor([0, bad]))
