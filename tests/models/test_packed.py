"""Models whose matrices stay packed: the values of the plain ones, and rows with the same bits in any company."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from forerun.attention.native import NativeAttention
from forerun.errors import ConfigError
from forerun.kernels import native
from forerun.kernels.fused import Experts, PlainLinear
from forerun.kernels.packed import PackedLinear, PackedWeight
from forerun.models.builtin import resolve_model
from forerun.models.decoder import Decoder
from forerun.models.loading import load_model

from .test_decoder import TOKENS, TOLERANCE
from .tiny import FAMILIES, TIED_ONLY, PagedCache, chunks, hf_logits, hf_model, quantised, save_hf, write_gguf

pytestmark = pytest.mark.skipif(not native.available(), reason="the CPU extension is not built")

# Activations are rounded to int8: measured 0.01 to 0.025 in these models of random weights; with experts up to 0.08,
# where a near tie between two of them falls the other way. bf16 products, which round nothing, must be exact.
ROUNDED = 0.05


class Cache(PagedCache):
    """What nobody wrote is NaN there."""

    def __init__(self, decoder: Decoder, num_blocks: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(decoder, NativeAttention, num_blocks, dtype, fill=255)


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def kinds_of(decoder: Decoder) -> list[list[str]]:
    """Of the first layer's qkv, output, gate_up and down."""
    linears = decoder.layers[0].linears
    return [[w.kind for w in linear.weights] if isinstance(linear, PackedLinear) else ["plain"] for linear in linears]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_matrices_stay_as_they_are(family: str, kind: Kind, tmp_path: Path) -> None:
    model = quantised(hf_model(family, tie_word_embeddings=family in TIED_ONLY), kind)
    path = write_gguf(model, tmp_path / "model.gguf", kind)
    decoder, plain = load_model(path, packed=True), load_model(path)
    routers = {id(layer.mlp.router) for layer in decoder.layers if isinstance(layer.mlp, Experts)}
    assert all(isinstance(linear, PackedLinear) != (id(linear) in routers) for linear in decoder.linears)
    assert isinstance(decoder.embedding, PackedWeight)
    assert decoder.row_multiple == 1
    for ours, theirs in zip(decoder.linears, plain.linears, strict=True):
        assert isinstance(theirs, PlainLinear)
        if not isinstance(ours, PackedLinear):
            assert torch.equal(ours.weight, theirs.weight)
            continue
        assert torch.equal(torch.cat([weight.dequantize() for weight in ours.weights]), theirs.weight)
        assert (ours.bias is None) == (theirs.bias is None)
        assert ours.bias is None or torch.equal(ours.bias, theirs.bias)
    tolerance = TOLERANCE if kind == Kind.BF16 else ROUNDED * (2 if family == "qwen3_moe" else 1)
    assert relative_difference(Cache(decoder).logits(TOKENS), hf_logits(model, TOKENS)) < tolerance


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_shares_the_embedding(tied: bool, tmp_path: Path) -> None:
    model = quantised(hf_model("llama", tie_word_embeddings=tied), Kind.Q8_0)
    decoder = load_model(write_gguf(model, tmp_path / "model.gguf", Kind.Q8_0), packed=True)
    assert isinstance(decoder.head, PackedLinear)
    assert (decoder.head.weights[0] is decoder.embedding) == tied
    matrices = sum(linear.num_bytes for linear in decoder.linears if isinstance(linear, PackedLinear))
    assert isinstance(decoder.embedding, PackedWeight)
    assert decoder.weight_bytes == matrices + (0 if tied else decoder.embedding.num_bytes)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16])
def test_what_no_packed_kind_keeps_becomes_plain(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", kind)
    decoder = load_model(path, packed=True)
    assert kinds_of(decoder) == [["plain"]] * 4
    assert decoder.row_multiple == 8
    whole = Cache(decoder).logits(TOKENS)
    assert relative_difference(whole, Cache(load_model(path)).logits(TOKENS)) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "quantization", "kind"),
    [
        (torch.bfloat16, None, "bf16"),
        (torch.float32, None, "plain"),
        (torch.bfloat16, "int8", "q8_0"),
        (torch.float32, "int8", "q8_0"),
        (torch.float16, "int8", "q8_0"),
    ],
)
def test_safetensors(dtype: torch.dtype, quantization: str | None, kind: str, tmp_path: Path) -> None:
    model = hf_model("qwen2")
    path = save_hf(model.to(dtype), tmp_path)
    decoder = load_model(path, packed=True, quantization=quantization)
    assert kinds_of(decoder) == [[kind]] * 4
    wide = type(model).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    tolerance = ROUNDED if quantization else TOLERANCE
    assert relative_difference(Cache(decoder).logits(TOKENS), hf_logits(wide, TOKENS)) < tolerance


def test_int8_leaves_quantised_kinds_alone(tmp_path: Path) -> None:
    model = hf_model("llama")
    for kind, expected in [(Kind.Q4_0, "q4_0"), (Kind.F32, "q8_0"), (Kind.BF16, "q8_0"), (Kind.F16, "q8_0")]:
        path = write_gguf(model, tmp_path / f"{kind.name}.gguf", kind)
        assert kinds_of(load_model(path, quantization="int8")) == [[expected]] * 4


def test_fused_parts_of_different_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Q4_K_M files have it: v in a wider kind than q and k."""
    model = quantised(hf_model("llama"), Kind.Q8_0)
    path = write_gguf(model, tmp_path / "model.gguf", Kind.Q8_0)
    expected = load_model(path, packed=True)
    real = load_model.__globals__["kind_for"]

    def kind_for(packed: bool, quantization: str | None) -> Any:
        choose = real(packed, quantization)
        return lambda source: "bf16" if "attn_v" in source.where or "ffn_up" in source.where else choose(source)

    monkeypatch.setitem(load_model.__globals__, "kind_for", kind_for)
    mixed = load_model(path, packed=True)
    assert kinds_of(mixed) == [["q8_0", "bf16"], ["q8_0"], ["q8_0", "bf16"], ["q8_0"]]
    got, wanted = Cache(mixed).logits(TOKENS), Cache(expected).logits(TOKENS)
    assert relative_difference(got, wanted) < ROUNDED


def test_a_router_is_never_rounded(tmp_path: Path) -> None:
    model = hf_model("qwen3_moe")
    for dtype, router in [(torch.float32, PlainLinear), (torch.bfloat16, PackedLinear)]:
        decoder = load_model(save_hf(model.to(dtype), tmp_path / str(dtype)), quantization="int8")
        for layer in decoder.layers:
            assert isinstance(layer.mlp, Experts)
            assert isinstance(layer.mlp.router, router)
            assert [w.kind for linear in layer.mlp.experts[3].linears for w in linear.weights] == ["q8_0"] * 2
        weight = decoder.layers[0].mlp.router
        values = weight.weight if isinstance(weight, PlainLinear) else weight.weights[0].dequantize()
        assert torch.equal(values, model.model.layers[0].mlp.gate.weight.float())
        assert decoder.row_multiple == 1


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'int3' is not supported"):
        load_model(tmp_path, quantization="int3")


def test_without_the_extension_packed_means_nothing_and_int8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(hf_model("llama"), tmp_path / "model.gguf", Kind.Q8_0)
    monkeypatch.setattr(native, "_native", None)
    assert kinds_of(load_model(path, packed=True)) == [["plain"]] * 4
    with pytest.raises(ConfigError, match="needs the CPU extension"):
        load_model(path, quantization="int8")


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_chunks_threads_or_instruction_set(family: str, kind: Kind, tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 24, "intermediate_size": 160}
    model = hf_model(family, **sizes, tie_word_embeddings=family in TIED_ONLY)
    decoder = load_model(write_gguf(model, tmp_path / "model.gguf", kind), packed=True)
    tokens = (TOKENS * 5)[:70]
    whole = Cache(decoder).logits(tokens)
    sizes_of = itertools.cycle([[70], [1] * 20 + [50], [33, 4, 8, 1, 24], [2, 3, 5, 60], [64, 6]])
    for isa, threads in itertools.product(native.isas(), (1, 2, 4)):
        cache, pieces = Cache(decoder), []
        with native.use(isa=isa, num_threads=threads):
            for part, start in chunks(tokens, iter(next(sizes_of))):
                pieces.append(cache.logits(part, start))
        assert torch.equal(torch.cat(pieces), whole), (isa, threads)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "length"), [("smollm2-135m", 200), ("gemma3-270m", 600)])  # past Gemma's window, 512
def test_bits_of_a_real_model_do_not_depend_on_chunks_threads_or_instruction_set(
    name: str, length: int, dtype: torch.dtype
) -> None:
    decoder = load_model(resolve_model(name), packed=True, max_positions=1024)
    tokens = torch.randint(100, 40_000, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    rest = length - 200
    whole = Cache(decoder, 40, dtype).logits(tokens)
    sizes_of = itertools.cycle([[70, 1, 1, 1, 127, rest], [5, 195 + rest], [64 + rest, 8, 33, 4, 91], [1] * 10 + [999]])
    for isa, threads in itertools.product([isa for isa in native.isas() if isa != "portable"], (1, 2, 4)):
        cache, pieces = Cache(decoder, 40, dtype), []
        with native.use(isa=isa, num_threads=threads):
            for part, start in chunks(tokens, iter(next(sizes_of))):
                pieces.append(cache.logits(part, start))
        assert torch.equal(torch.cat(pieces), whole), (isa, threads)
