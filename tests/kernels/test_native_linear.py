"""Products with packed weights: right, and a row has the same bits in any company, on any path."""

from __future__ import annotations

import random

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from forerun.kernels import native

if not native.available():
    pytest.skip("the CPU extension is not built", allow_module_level=True)

from forerun.kernels.packed import KINDS, PackedLinear, PackedWeight, quantize_rows, quantized_linear
from tests.kernels.native_cases import packed, rows

TYPES = [
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.BF16,
]  # one for each packed kind

all_types = pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
all_terms = pytest.mark.parametrize("terms", [1, 2])
all_isas = pytest.mark.parametrize("isa", native.isas())


def test_the_types_of_this_file_are_all_kinds() -> None:
    assert sorted(KINDS[t] for t in TYPES) == sorted(native.extension().kinds())


@all_types
@all_isas
@pytest.mark.parametrize(("num_rows", "terms"), [(1, 1), (3, 1), (8, 1), (70, 1), (1, 2), (3, 2), (70, 2)])
def test_a_product_is_that_of_the_plain_twin(
    ggml_type: GGMLQuantizationType, isa: str, num_rows: int, terms: int
) -> None:
    weight, x = packed(ggml_type, 45, 512), rows(num_rows, 512)
    values = weight.dequantize()
    bias = torch.randn(45, generator=torch.Generator().manual_seed(2))
    if weight.kind == "bf16":
        expected = (x.double() @ values.double().T + bias).float()
    else:
        expected = quantized_linear(x, values, bias, terms)
    with native.use(isa=isa):
        y = PackedLinear([weight], bias, terms)(x)
    # float32 sums of 16 groups, or of 512 products: each rounds by 2^-24 of a sum of at most sum |x w|
    scale = (x.abs() @ values.abs().T).max().item()
    torch.testing.assert_close(y, expected, rtol=0, atol=32 * 2**-24 * scale)


@all_types
@all_isas
@all_terms
def test_the_first_rows_have_the_same_bits_at_every_row_count(
    ggml_type: GGMLQuantizationType, isa: str, terms: int
) -> None:
    linear, x = PackedLinear([packed(ggml_type, 23, 256)], terms=terms), rows(70, 256)
    with native.use(isa=isa):
        expected = linear(x)
        for count in range(1, 70):
            assert torch.equal(linear(x[:count]), expected[:count]), f"{count} rows"


@all_types
@all_isas
@all_terms
def test_a_row_has_the_same_bits_at_every_place_beside_any_rows(
    ggml_type: GGMLQuantizationType, isa: str, terms: int
) -> None:
    linear, x = PackedLinear([packed(ggml_type, 40, 768)], terms=terms), rows(64, 768)
    rng = random.Random(0)
    with native.use(isa=isa):
        expected = linear(x)
        for _ in range(60):
            chosen = rng.choices(range(64), k=rng.randrange(1, 40))
            assert torch.equal(linear(x[chosen]), expected[chosen])


@all_types
@pytest.mark.parametrize(("n", "k"), [(1, 256), (16, 512), (333, 1536), (2048, 256)])
@all_terms
def test_threads_and_instruction_sets_do_not_change_a_bit(
    ggml_type: GGMLQuantizationType, n: int, k: int, terms: int
) -> None:
    linear, x = PackedLinear([packed(ggml_type, n, k)], terms=terms), rows(13, k)
    with native.use(isa="portable", num_threads=1):
        expected = linear(x)
    for isa in native.isas():
        for threads in (1, 2, 3, 7):
            with native.use(isa=isa, num_threads=threads):
                assert torch.equal(linear(x), expected), f"{isa}, {threads} threads"


@all_types
def test_columns_do_not_depend_on_the_matrices_beside_them(ggml_type: GGMLQuantizationType) -> None:
    weights = [packed(GGMLQuantizationType.Q6_K, 21, 256), packed(ggml_type, 50, 256), packed(ggml_type, 7, 256)]
    bias = torch.arange(78.0)
    x = rows(9, 256)
    alone = [PackedLinear([weight])(x) for weight in weights]
    assert torch.equal(PackedLinear(weights, bias)(x), torch.cat(alone, dim=1) + bias)


@all_isas
@pytest.mark.parametrize("k", [1, 31, 32, 33, 64, 95, 96, 97])
@pytest.mark.parametrize("kind", ["q8_0", "bf16"])
def test_any_width_is_padded_with_zeros(isa: str, k: int, kind: str) -> None:
    values = torch.randn(18, k, generator=torch.Generator().manual_seed(0))
    weight, x = PackedWeight.of_floats(values, kind), rows(5, k)
    wide = torch.full((5, k + 3), torch.nan)
    wide[:, :k] = x  # what stands beyond a row must not matter
    with native.use(isa=isa):
        y = PackedLinear([weight])(wide[:, :k])
    expected = quantized_linear(x, weight.dequantize()) if kind == "q8_0" else x @ weight.dequantize().T
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@all_isas
def test_activations_are_quantised_as_in_the_plain_twin(isa: str) -> None:
    x = rows(6, 160) * torch.logspace(-40, 30, 160)
    x[1, :32] = 0
    x[2, 32:64] = torch.arange(-16, 16) + 0.5  # ties, at a scale that makes them ones
    x[2, 63] = 127
    x[3, 5], x[4, 40], x[5, 159] = torch.nan, torch.inf, -torch.inf
    values, scales = native_quantize(x, isa)
    expected_values, expected_scales = quantize_rows(x)
    assert torch.equal(values[:, :5], expected_values)
    assert torch.equal(scales[:, :5].nan_to_num(-1), expected_scales.nan_to_num(-1))
    assert not values[:, 5:].any()
    assert not scales[:, 5:].any()


def native_quantize(x: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    groups = -(-x.shape[1] // 64) * 2
    values, scales = torch.empty(x.shape[0], groups, 32, dtype=torch.int8), torch.empty(x.shape[0], groups)
    with native.use(isa=isa):
        native.extension().quantize(x.data_ptr(), *x.shape, values.data_ptr(), scales.data_ptr())
    return values, scales


@all_types
@all_isas
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(ggml_type: GGMLQuantizationType, isa: str) -> None:
    linear, x = PackedLinear([packed(ggml_type, 16, 256)]), rows(5, 256)
    with native.use(isa=isa):
        expected = linear(x)
        x[2, 100] = torch.nan
        y = linear(x)
    assert y[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], expected[others])


@all_types
@all_isas
def test_the_largest_values_do_not_overflow(ggml_type: GGMLQuantizationType, isa: str) -> None:
    """Quants and activations at both ends of their ranges: sums of 16 bits must hold them."""
    weight = packed(ggml_type, 32, 512)
    if weight.kind == "bf16":
        return
    fill_quants(weight)
    signs = torch.tensor([1.0, -1.0]).repeat(256)
    x = torch.stack([torch.ones(512), -torch.ones(512), signs, -signs])
    with native.use(isa=isa):
        y = PackedLinear([weight])(x)
    values = weight.dequantize()
    scale = (x.abs() @ values.abs().T).max().item()
    torch.testing.assert_close(y, quantized_linear(x, values), rtol=0, atol=32 * 2**-24 * scale)


def fill_quants(weight: PackedWeight) -> None:
    """All quants of even outputs the largest, of odd outputs the smallest that the kind has; scales stay."""
    bits = int(weight.kind[1])
    groups = 8 if weight.kind.endswith("_k") else 2
    quant_bytes = groups * bits * 64
    record_bytes = weight.data.numel() // (weight.shape[0] // 16 * (weight.shape[1] // (32 * groups)))
    quants = weight.data.view(-1, record_bytes)[:, record_bytes - quant_bytes :].unflatten(1, (-1, 16, 4))
    quants[:, :, 0::2] = 127 if bits == 8 else 255
    quants[:, :, 1::2] = 128 if bits == 8 else 0


@all_isas
def test_two_terms_keep_fifteen_bits(isa: str) -> None:
    """Of a group's largest value: half a step of a step, 1 / (2 * 127 * 127 * 2), rounding of the parts aside."""
    one_hot = PackedLinear([PackedWeight.of_floats(torch.eye(128) * 127, "q8_0")], terms=2)  # scale 1: all is exact
    x = rows(9, 128)
    with native.use(isa=isa):
        y = one_hot(x) / 127
    largest = x.view(9, 4, 32).abs().amax(-1, keepdim=True).expand(9, 4, 32).reshape(9, 128)
    assert ((y - x).abs() <= largest * (1.01 / (4 * 127**2))).all()
    assert ((y - x).abs() > largest * 2**-20).any(), "terms of more bits than promised: the test proves nothing"


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = packed(GGMLQuantizationType.Q8_0, 16, 64)
    linear = PackedLinear([weight])
    for bad in (torch.zeros(2, 32), torch.zeros(64), torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(64, 64).T):
        with pytest.raises(ValueError, match="expected"):
            linear(bad)
    with pytest.raises(ValueError, match="out"):
        linear(torch.zeros(2, 64), torch.zeros(2, 15))
    with pytest.raises(ValueError, match="bias"):
        PackedLinear([weight], torch.zeros(15))
    with pytest.raises(ValueError, match="one or two terms"):
        PackedLinear([weight], terms=3)
    with pytest.raises(ValueError, match="different K"):
        PackedLinear([weight, packed(GGMLQuantizationType.Q8_0, 16, 128)])
    assert linear(torch.zeros(0, 64)).shape == (0, 16)
