"""Checkpoints: both layouts give the same model, and broken ones give one clear line."""

from __future__ import annotations

import dataclasses
import json
import logging
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
from transformers import PreTrainedModel

from forerun.errors import CheckpointError
from forerun.models.decoder import Decoder
from forerun.models.gguf_file import GgufFile
from forerun.models.loading import gguf_sources, load_model, read_config

from .test_decoder import LLAMA3, TOKENS, TOLERANCE, logits_of, relative_difference
from .tiny import FAMILIES, hf_logits, hf_model, quantised, save_hf, write_gguf


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
    model = hf_model(family, tie_word_embeddings=tied)
    from_hf = load_model(save_hf(model, tmp_path / "hf"))
    from_gguf = load_model(write_gguf(model, tmp_path / "model.gguf"))
    assert from_gguf.config.tie_word_embeddings == tied
    assert (from_gguf.head.weight is from_gguf.embedding) == tied
    assert torch.equal(logits_of(from_gguf, TOKENS), logits_of(from_hf, TOKENS))


def test_interleaved_biases_are_put_in_order(tmp_path: Path) -> None:
    model = hf_model("llama", attention_bias=True, mlp_bias=True)
    decoder = load_model(write_gguf(model, tmp_path / "model.gguf"))
    assert relative_difference(logits_of(decoder, TOKENS), hf_logits(model, TOKENS)) < TOLERANCE


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
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
    assert torch.equal(layer.gate_up.weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
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
    assert load_model(saved / "hf", max_positions=300).cos.shape == (300, 8)


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported: llama, qwen2, qwen3"),
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
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor must be a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "rope theta must be above 1"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=true is not supported yet"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window=true is not supported yet"),
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
        ({"general.architecture": "gemma3"}, "general.architecture='gemma3' is not supported; supported: llama,"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8 is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "rope type 'longrope' is not supported"),
        ({"llama.attention.sliding_window": 32}, "sliding_window=32 is not supported yet"),
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
        ("rope_freqs.weight", np.ones(9, np.float32), "rope_freqs.weight: expected shape [8], found [9]"),
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
