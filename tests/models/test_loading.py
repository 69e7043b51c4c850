"""Checkpoints: both layouts give the same model, and broken ones give one clear line."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, PreTrainedModel

from forerun.errors import CheckpointError
from forerun.models.config import DecoderConfig, RopeConfig
from forerun.models.decoder import Decoder
from forerun.models.gguf_file import GgufFile
from forerun.models.loading import gguf_sources, load_model, read_config

from .test_decoder import LLAMA3, TOKENS, TOLERANCE, logits_of, relative_difference
from .tiny import FAMILIES, TIED_ONLY, hf_logits, hf_model, quantised, save_hf, write_gguf


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return hf_model("llama")


@pytest.fixture(scope="module")
def saved(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint: `hf/` and `model.gguf`. Copy before breaking it."""
    root = tmp_path_factory.mktemp("saved")
    save_hf(model, root / "hf")
    write_gguf(model, root / "model.gguf")
    return root


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "hf", tmp_path / "hf"))


@pytest.fixture
def gguf_file(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(saved / "model.gguf", tmp_path / "model.gguf"))


def refused(path: Path | str, *parts: str) -> str:
    """Loading fails with one line that holds all parts."""
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# Both layouts, all kinds


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_is_the_same_model_as_the_directory(family: str, tied: bool, tmp_path: Path) -> None:
    if family in TIED_ONLY and not tied:
        pytest.skip("llama.cpp's files of this family have no head of their own")
    model = hf_model(family, tie_word_embeddings=tied)
    from_hf = load_model(save_hf(model, tmp_path / "hf"))
    from_gguf = load_model(write_gguf(model, tmp_path / "model.gguf"))
    assert same_but_for_names(from_gguf.config, from_hf.config)
    assert from_gguf.config.tie_word_embeddings == tied
    assert (from_gguf.head.weight is from_gguf.embedding) == tied
    tokens = TOKENS * 3
    difference = relative_difference(logits_of(from_gguf, tokens), logits_of(from_hf, tokens))
    # Numbers in GGUF metadata are float32: what is not exact in it makes a last bit of difference.
    assert difference < 1e-6 if family in INEXACT else difference == 0


INEXACT = ("granite", "gemma2", "gemma3_text")


def same_but_for_names(ours: DecoderConfig, theirs: DecoderConfig) -> bool:
    """GGUF files call Mistral Llama, hold float32 numbers, and do not know the dense MLP of a model of experts."""
    for field in dataclasses.fields(DecoderConfig):
        if field.name in ("family", "intermediate_size", "rope", "sliding_rope"):
            continue
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "attention_scale":
            one, other = one or ours.head_dim**-0.5, other or theirs.head_dim**-0.5
        assert one == (pytest.approx(other, rel=1e-6) if isinstance(other, float) else other), field.name
    return True


def test_interleaved_biases_are_put_in_order(tmp_path: Path) -> None:
    model = hf_model("llama", attention_bias=True, mlp_bias=True)
    decoder = load_model(write_gguf(model, tmp_path / "model.gguf"))
    assert relative_difference(logits_of(decoder, TOKENS), hf_logits(model, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "qwen3_moe"])
def test_quantised_kinds_are_dequantised(family: str, kind: Kind, tmp_path: Path) -> None:
    model = hf_model(family, head_dim=16)
    decoder = load_model(write_gguf(model, tmp_path / "model.gguf", kind))
    expected = hf_logits(quantised(model, kind), TOKENS)
    assert relative_difference(logits_of(decoder, TOKENS), expected) < TOLERANCE


def test_llama3_scaling_comes_from_the_tensor_of_a_gguf_file(tmp_path: Path) -> None:
    model = hf_model("llama", rope_parameters=LLAMA3)
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 2
    path = write_gguf(model, tmp_path / "model.gguf", extra={"rope_freqs.weight": factors})
    tokens = TOKENS * 3
    assert relative_difference(logits_of(load_model(path), tokens), hf_logits(model, tokens)) < TOLERANCE


def test_yarn_is_read_from_gguf_metadata(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    model = hf_model("qwen2", rope_parameters=yarn)
    metadata = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
    }
    decoder = load_model(write_gguf(model, tmp_path / "model.gguf", metadata=metadata))
    tokens = TOKENS * 3
    assert relative_difference(logits_of(decoder, tokens), hf_logits(model, tokens)) < TOLERANCE


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.9],
    "long_factor": [1.5, 2.5, 4.0, 9.0],
}


@pytest.mark.parametrize("max_positions", [32, 100])
def test_longrope_takes_its_factors_by_the_longest_sequence(max_positions: int, tmp_path: Path) -> None:
    """transformers chooses by the text at hand: short within the original context, long for all of a longer one."""
    model = hf_model("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32)
    long, short = (np.array(LONGROPE[key], np.float32) for key in ("long_factor", "short_factor"))
    extra = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    factor = (1 + math.log(128 / 32) / math.log(32)) ** 0.5
    path = write_gguf(model, tmp_path / "m.gguf", metadata={"phi3.rope.scaling.attn_factor": factor}, extra=extra)
    tokens = (TOKENS * 6)[:max_positions]
    expected = hf_logits(model, tokens)
    for source in (save_hf(model, tmp_path / "hf"), path):
        decoder = load_model(source, max_positions=max_positions)
        assert relative_difference(logits_of(decoder, tokens), expected) < TOLERANCE


def test_a_text_model_is_found_in_a_checkpoint_with_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = hf_model("gemma3_text", tie_word_embeddings=True)
    values = json.loads(save_hf(text, tmp_path).joinpath("config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    expected = hf_logits(text, TOKENS * 3)
    for prefix in ("language_model.model.", "model.language_model."):  # transformers 4 and 5
        named = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        tower = "vision_tower." if prefix.startswith("language") else "model.vision_tower."
        save_file(named | {f"{tower}layers.0.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
        config = {"model_type": "gemma3", "text_config": values, "vision_config": {"hidden_size": 8}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with caplog.at_level(logging.WARNING):
            decoder = load_model(tmp_path)
        assert not caplog.records
        assert relative_difference(logits_of(decoder, TOKENS * 3), expected) < TOLERANCE


def test_the_defaults_of_gemma_3_are_those_of_transformers(tmp_path: Path) -> None:
    """As published: config.json of a model with images names what differs from the defaults only."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    ours, theirs = read_config(tmp_path), Gemma3TextConfig(**text)
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads) == (theirs.vocab_size, 8, 4)
    assert (ours.head_dim, ours.max_position_embeddings) == (theirs.head_dim, theirs.max_position_embeddings)
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert ours.tie_word_embeddings
    kinds = ["full_attention" if window is None else "sliding_attention" for window in ours.sliding_windows]
    assert kinds == theirs.layer_types
    assert set(ours.sliding_windows) == {None, 1024}
    assert (ours.rope.theta, ours.rope.type, ours.rope.factor) == (1e6, "linear", 8.0)
    assert ours.sliding_rope == RopeConfig(theta=1e4)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_27b_models_of_gemma_scale_scores_by_their_width(family: str, layers: int, tmp_path: Path) -> None:
    """GGUF files do not say so; llama.cpp knows them by their layers."""
    sizes = {"num_hidden_layers": layers, "hidden_size": 16, "intermediate_size": 8, "query_pre_attn_scalar": 4}
    model = hf_model(family, **sizes, tie_word_embeddings=True, layer_types=None)
    config = read_config(write_gguf(model, tmp_path / "model.gguf"))
    assert config.attention_scale == 4**-0.5
    assert read_config(save_hf(model, tmp_path)).attention_scale == 4**-0.5


def test_windows_of_a_gguf_file_may_be_flags(tmp_path: Path) -> None:
    model = hf_model("gemma3_text", tie_word_embeddings=True)
    key, path = "gemma3.attention.sliding_window_pattern", tmp_path / "model.gguf"
    write_gguf(model, path, metadata={key: [True, False, True]})
    assert read_config(path).sliding_windows == (12, None, 12)
    refused(write_gguf(model, path, metadata={key: [True]}), f"{key} must be 3 flags")


def test_shards_are_put_together(model: PreTrainedModel, saved: Path, tmp_path: Path) -> None:
    save_hf(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(load_model(tmp_path), TOKENS), logits_of(load_model(saved / "hf"), TOKENS))


def test_names_may_lack_the_model_prefix(directory: Path, saved: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(directory, strip)
    assert torch.equal(logits_of(load_model(directory), TOKENS), logits_of(load_model(saved / "hf"), TOKENS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_widened(dtype: torch.dtype, tmp_path: Path) -> None:
    model = hf_model("qwen2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    expected = hf_logits(model, TOKENS)  # before .to(dtype), which rounds the rope frequencies too
    decoder = load_model(save_hf(model.to(dtype), tmp_path))
    assert decoder.dtype == torch.float32
    assert relative_difference(logits_of(decoder, TOKENS), expected) < TOLERANCE


def test_weights_are_fused_with_the_gate_first(model: PreTrainedModel, saved: Path) -> None:
    decoder: Decoder = load_model(saved / "hf")
    layer, theirs = decoder.layers[1], model.model.layers[1]
    attention, mlp = theirs.self_attn, theirs.mlp
    assert torch.equal(
        layer.qkv.weight, torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    )
    assert torch.equal(layer.mlp.gate_up.weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert sum(p.numel() for p in model.parameters()) == decoder.config.num_parameters


def test_the_config_is_read_without_weights(directory: Path, saved: Path) -> None:
    whole = read_config(directory)
    eps = read_config(saved / "model.gguf").rms_norm_eps  # float32 there
    assert eps == pytest.approx(whole.rms_norm_eps)
    assert dataclasses.replace(read_config(saved / "model.gguf"), rms_norm_eps=whole.rms_norm_eps) == whole
    (directory / "model.safetensors").unlink()
    assert read_config(directory) == whole
    assert (whole.num_layers, whole.num_heads, whole.num_kv_heads, whole.head_dim) == (3, 4, 2, 16)
    assert whole.kv_bytes_per_token() == 2 * 3 * 2 * 16 * 4


def test_end_tokens_of_the_generation_config_count(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert read_config(directory).eos_token_ids == (2, 7, 9)


def test_positions_reach_as_far_as_asked(saved: Path) -> None:
    assert load_model(saved / "hf").max_positions == 128
    ((cos, sin),) = load_model(saved / "hf", max_positions=300).rope_tables
    assert cos.shape == sin.shape == (300, 8)


# What is refused


def test_a_missing_path_and_a_misspelt_built_in_name_are_told_apart() -> None:
    refused("no/such/dir", "no/such/dir: no such file or directory")
    refused("smolm2-135m", "did you mean 'smollm2-135m'?")


def test_a_directory_without_a_model_is_refused(tmp_path: Path, gguf_file: Path) -> None:
    refused(gguf_file.parent, "has no config.json", str(gguf_file))
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no config.json")


def test_a_directory_without_weights_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    refused(directory, "has no *.safetensors file")
    (directory / "pytorch_model.bin").write_bytes(b"anything")
    refused(directory, "pickles only (pytorch_model.bin)")
    refused(directory / "pytorch_model.bin", "is a pickle")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "nonsense", '{"a": 1}}', "[" * 100_000, '"\\ud800'])
def test_a_broken_config_json_is_refused(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    refused(directory, "config.json")


WINDOWS = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
GEMMA = {"model_type": "gemma2", "head_dim": 16}
MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported: llama, mistral, qwen2, "),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, got '64'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -64}, "hidden_size must be in"),
        ({"num_hidden_layers": 10**30}, "num_layers must be in"),
        ({"num_hidden_layers": 10**6}, "num_layers must be at most"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_attention_heads": 0}, "num_heads must be in"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be a token id"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope frequency factors: expected 8, found 0"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}},
            "rope long factors: expected 8, found 7",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": ["1"]}}, "short_factor must be a list of numbers"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor must be a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "rope theta must be above 1"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor=nan is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"residual_multiplier": 0.5}, "residual_multiplier=0.5 is not supported"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        (WINDOWS | {"sliding_window": 0}, "sliding_window must be in [1"),
        (WINDOWS | {"sliding_window": "all"}, "sliding_window must be an integer"),
        (WINDOWS | {"layer_types": ["full_attention"] * 2}, "layer_types must be a list of 3"),
        (WINDOWS | {"layer_types": ["linear_attention"] * 3}, "layer_types: 'linear_attention' is not supported"),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, got 0"),
        (GEMMA | {"attn_logit_softcapping": -1.0}, "attention_softcap must be a positive number"),
        (GEMMA | {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        (GEMMA | {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "layer_types is not supported"),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 is not supported"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.45}, "rope must turn an even number of a head's 16"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scale must be a positive number"),
        (MOE | {"num_experts": None, "num_local_experts": 10**6}, "num_experts must be at most"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok must be in [1, 8], got 9"),
        (MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        (MOE | {"mlp_only_layers": "all"}, "mlp_only_layers must be a token id or a list"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(directory: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(directory, **changes)
    refused(directory, str(directory / "config.json"), said)


@pytest.mark.parametrize(
    ("name", "replacement", "said"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "tensor 'layers.1.mlp.up_proj.weight' is missing"),
        ("lm_head.weight", None, "tensor 'lm_head.weight' is missing"),
        ("model.norm.weight", torch.zeros(63), "model.norm.weight: expected shape [64], found [63]"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), "is a layer's tensor that llama has no use for"),
        ("model.layers.3.input_layernorm.weight", torch.zeros(64), "is a layer's tensor that llama has no use for"),
        ("norm.weight", torch.zeros(64), "twice"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int8), "model.norm.weight is of kind I8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    directory: Path, name: str, replacement: torch.Tensor | None, said: str
) -> None:
    edit_tensors(directory, lambda t: t.pop(name) if replacement is None else t.update({name: replacement}))
    refused(directory, said)


def test_tensors_without_effect_are_named_or_passed_over(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "vision.weight": torch.zeros(2)}
    edit_tensors(directory, lambda t: t.update(extra))
    with caplog.at_level(logging.WARNING):
        load_model(directory)
    assert [record.getMessage() for record in caplog.records] == [
        f"{directory / 'model.safetensors'}: vision.weight is not used"
    ]


@pytest.mark.parametrize("value", ["../other/model.safetensors", "", "..", "/etc/x.safetensors", 3, "a\0b"])
def test_an_index_may_only_name_its_neighbours(directory: Path, value: object) -> None:
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": value}}))
    refused(directory, "its own directory")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    refused(directory, "model-1.safetensors", "No such file")
    index.write_text("{}")
    refused(directory, "weight_map is missing or empty")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"GG", b"PK\x03\x04" * 10):
        path.write_bytes(content)
        refused(path, str(path), "is not a GGUF file")
    path.write_bytes(b"GGUF\x01\0\0\0" + bytes(40))
    refused(path, "GGUF version 1 is not supported")
    path.write_bytes(b"GGUF\0\0\0\x03" + bytes(40))
    refused(path, "big-endian")
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(40))
    refused(path, "general.architecture is missing")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "mamba"}, "general.architecture='mamba' is not supported; supported: llama, qwen2,"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"llama.logit_scale": 4.0}, "llama.logit_scale=4.0 is not supported"),
        ({"llama.attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping=50.0 is not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8 is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope frequency factors: expected 8, found 0"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope type 'dynamic' is not supported"),
        ({"split.count": 3}, "split GGUF files are not supported"),
        ({"llama.context_length": "long"}, "llama.context_length must be an integer"),
    ],
)
def test_gguf_metadata_that_cannot_be_honoured_is_refused(
    model: PreTrainedModel, tmp_path: Path, metadata: dict[str, Any], said: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(model, path, metadata=metadata)
    refused(path, str(path), said)


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("blk.3.attn_norm.weight", np.zeros(64, np.float32), "is a layer's tensor that llama has no use for"),
        ("blk.0.ffn_gate_exps.weight", np.zeros((2, 4, 64), np.float32), "is a layer's tensor that llama has no use"),
        ("blk.0.attn_q.bias", np.zeros(64, np.float32), "tensor 'blk.0.attn_k.bias' is missing"),
        ("rope_freqs.weight", np.ones(9, np.float32), "rope frequency factors: expected 8, found 9"),
        ("rope_freqs.weight", np.ones((8, 8), np.float32), "'rope_freqs.weight' must be a vector"),
        ("rope_factors_long.weight", np.ones(8, np.float32), "rope frequency factors: expected 8, found 0"),
        ("rope_freqs.weight", np.zeros(8, np.float32), "rope frequency factor must be a positive number"),
        ("rope_freqs.weight", np.ones(8, np.int32), "'rope_freqs.weight' is of kind I32, which cannot be dequantised"),
    ],
)
def test_gguf_tensors_that_do_not_fit_are_refused(
    model: PreTrainedModel, tmp_path: Path, name: str, array: np.ndarray, said: str
) -> None:
    refused(write_gguf(model, tmp_path / "model.gguf", extra={name: array}), said)


def test_a_name_cannot_smuggle_lines_or_escape_codes_into_a_log(
    model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, vector = tmp_path / "model.gguf", np.zeros(4, np.float32)
    refused(write_gguf(model, path, extra={"blk.0.\n\x1b[31m": vector}), r"blk.0.\n\x1b[31m is a layer's tensor")
    load_model(write_gguf(model, path, extra={"\n\x1b[31m" + 5000 * "a": vector}))
    (message,) = [record.getMessage() for record in caplog.records if record.name == "forerun.models.loading"]
    assert message.isprintable()
    assert len(message) < 1100


def test_a_kind_that_cannot_be_dequantised_is_named(gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    name = b"blk.1.ffn_down.weight"
    kind_at = data.index(name) + len(name) + 4 + 2 * 8
    gguf_file.write_bytes(data[:kind_at] + (26).to_bytes(4, "little") + data[kind_at + 4 :])
    refused(gguf_file, "tensor 'blk.1.ffn_down.weight' is of kind I32, which cannot be dequantised")
    gguf_file.write_bytes(data[:kind_at] + (99).to_bytes(4, "little") + data[kind_at + 4 :])
    refused(gguf_file, "tensor 'blk.1.ffn_down.weight' is of unknown kind 99")
    gguf_file.write_bytes(data[:kind_at] + int(Kind.Q4_K).to_bytes(4, "little") + data[kind_at + 4 :])
    refused(gguf_file, "rows of kind Q4_K are multiples of 256")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_a_gguf_file_can_be_held_in_bfloat16(model: PreTrainedModel, tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(model, tmp_path / "model.gguf", kind)
    wide, narrow = load_model(path), load_model(path, dtype=torch.bfloat16)
    assert torch.equal(narrow.layers[1].qkv.weight, wide.layers[1].qkv.weight.bfloat16())
    assert torch.equal(narrow.norm, wide.norm.bfloat16())


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q2_K, Kind.Q3_K, Kind.IQ4_XS])
def test_superblock_kinds_are_read_in_chunks(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.loading.CHUNK_ELEMENTS", 5 * 256)  # rows do not divide into chunks
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 0x3C, (12, 2 * block_bytes), dtype=np.uint8)  # no inf or nan scales
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = torch.zeros(12, 512)
    gguf_sources(GgufFile(tmp_path / "t.gguf"))["t"].fill(target)
    assert torch.equal(target, torch.from_numpy(gguf.quants.dequantize(raw, kind)))


# Broken bytes: an error in one line, or a model, and quickly


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most of its bytes are header, so that most damage hits something that is read."""
    root = tmp_path_factory.mktemp("small")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8, "vocab_size": 8}
    model = hf_model("llama", **sizes)
    save_hf(model, root)
    write_gguf(model, root / "model.gguf")
    return root


def survives(path: Path) -> bool:
    """Whether it loads; any error but ours fails the test."""
    try:
        load_model(path, max_positions=16)
    except CheckpointError as error:
        message = str(error)
    else:
        return True
    assert "\n" not in message
    return False


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "config.json"])
def test_truncated_files_are_refused(small: Path, tmp_path: Path, name: str) -> None:
    directory = Path(shutil.copytree(small, tmp_path / "copy"))
    data = (small / name).read_bytes()
    target = directory / name if name == "model.gguf" else directory
    assert survives(target)
    for length in sorted(random.Random(0).sample(range(len(data) - 40), 60)):
        (directory / name).write_bytes(data[:length])
        assert not survives(target)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "config.json"])
def test_flipped_bytes_are_refused_or_harmless(small: Path, tmp_path: Path, name: str) -> None:
    directory = Path(shutil.copytree(small, tmp_path / "copy"))
    data = (small / name).read_bytes()
    target = directory / name if name == "model.gguf" else directory
    draw = random.Random(1)
    for _ in range(250):
        broken = bytearray(data)
        for _ in range(draw.choice([1, 1, 1, 8])):
            broken[draw.randrange(min(len(data), 3000))] = draw.randrange(256)
        (directory / name).write_bytes(broken)
        survives(target)


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [10**4, 2**31, 2**62, 2**64 - 1])
def test_a_count_that_the_file_cannot_hold_is_refused(gguf_file: Path, at: int, count: int) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[:at] + count.to_bytes(8, "little") + data[at + 8 :])
    refused(gguf_file, str(gguf_file))


def test_an_array_that_the_file_cannot_hold_is_refused(gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    name = b"tokenizer.ggml.tokens"
    at = data.index(name) + len(name) + 8  # the key, two type codes, then the count
    for count in (10**5, 2**40, 2**64 - 1):
        gguf_file.write_bytes(data[:at] + count.to_bytes(8, "little") + data[at + 8 :])
        refused(gguf_file, str(gguf_file))


def test_strings_of_a_gguf_file_are_decoded_on_demand(gguf_file: Path) -> None:
    tokens = GgufFile(gguf_file).metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 96
    assert (tokens[0], tokens[-1]) == ("token-0", "token-95")
    assert list(tokens[1:3]) == ["token-1", "token-2"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(saved: Path, tmp_path: Path, value: float) -> None:
    broken = shutil.copytree(saved / "hf", tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that are not finite"):
        load_model(broken)
