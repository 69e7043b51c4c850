"""What a head's checkpoint says, what of it is shared, and what is refused by name."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from forerun.errors import CheckpointError, ConfigError
from forerun.kernels import native
from forerun.models.decoder import Decoder
from forerun.models.heads import load_head, read_head
from forerun.models.heads.vocabulary import from_ids, from_offsets
from forerun.models.loading import load_model

from ..tiny import hf_model, write_gguf
from .tiny_heads import DRAFT_VOCAB, HIDDEN, VOCAB, Tensors, as_midlayer, eagle, eagle3, random, save, save_gguf

Edit = Callable[[dict[str, Any], Tensors], Any]
NUM_LAYERS = 8


def refusal(path: Path, target: Decoder, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_head(path, target, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def without(name: str) -> Edit:
    return lambda config, tensors: tensors.pop(name)


def setting(**values: Any) -> Edit:
    return lambda config, tensors: config.update(values)


def having(name: str, *shape: int) -> Edit:
    return lambda config, tensors: tensors.update({name: random(torch.Generator().manual_seed(0), *shape)})


def both(*edits: Edit) -> Edit:
    return lambda config, tensors: [edit(config, tensors) for edit in edits]


def absolute(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


REFUSED_EAGLE3: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "d2t missing": (without("d2t"), ("'d2t' is missing", "40 of 96")),
    "d2t absolute": (absolute, ("'d2t' holds absolute target ids",)),
    "d2t absolute, no t2d": (both(absolute, without("t2d")), ("'d2t' reads as absolute",)),
    "d2t of another shape": (lambda c, t: t.update(d2t=t["d2t"][:-1]), ("'d2t'", "expected shape [40], found [39]")),
    "d2t of floats": (lambda c, t: t.update(d2t=t["d2t"].float()), ("'d2t' must hold integers",)),
    "t2d of another head": (lambda c, t: t.update(t2d=t["t2d"].roll(1)), ("'d2t' and 't2d' disagree",)),
    "t2d of another target": (lambda c, t: t.update(t2d=t["t2d"][:-1]), ("'t2d'", "expected shape [96], found [95]")),
    "draft vocabulary too large": (setting(draft_vocab_size=97), ("draft_vocab_size=97 must be in 1..96",)),
    "vocabulary": (setting(vocab_size=128), ("vocab_size=128", "target's is 96", "another target")),
    "target width": (setting(target_hidden_size=128), ("target_hidden_size=128", "another target")),
    "fc of another target": (having("fc.weight", 64, 96), ("'fc.weight'", "[64, 192]", "[64, 96]", "another target")),
    "fc missing": (without("fc.weight"), ("'fc.weight' is missing",)),
    "layer out of range": (setting(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), ("0..8", "[2, 4, 9]")),
    "layer out of range by one": (setting(eagle_aux_hidden_state_layer_ids=[1, 4, 8]), ("ids + 1", "[2, 5, 9]")),
    "negative layer": (setting(eagle_aux_hidden_state_layer_ids=[-1, 4, 5]), ("[-1, 4, 5]",)),
    "layers not ascending": (setting(eagle_aux_hidden_state_layer_ids=[4, 2, 5]), ("ascending", "[4, 2, 5]")),
    "layers in words": (setting(eagle_aux_hidden_state_layer_ids=["2"]), ("must be a list of layers", "['2']")),
    "two layers for three": (setting(eagle_aux_hidden_state_layer_ids=[2, 4]), ("'fc.weight'", "2 states")),
    "other number of states": (setting(num_aux_hidden_states=4), ("eagle_aux_hidden_state_layer_ids is missing",)),
    "unknown norm": (setting(norm_after_fc=True), ("norm_after_fc=true", "norm_before_fc")),
    "unknown nested norm": (setting(eagle_config={"fc_out_norm": True}), ("eagle_config.fc_out_norm=true",)),
    "both norms before fc": (setting(norm_before_fc=True, fc_norm=True), ("norm_before_fc and fc_norm",)),
    "norm promised": (setting(norm_before_fc=True), ("'input_norm.weight' is missing", "norm_before_fc=true")),
    "norm not announced": (having("fc_norm.0.weight", 64), ("'fc_norm.0.weight' is no part of", "fc_norm=false")),
    "switch that is none": (setting(norm_output="yes"), ("norm_output must be true or false",)),
    "tensor missing": (without("layers.0.mlp.up_proj.weight"), ("'layers.0.mlp.up_proj.weight' is missing",)),
    "norm missing": (without("norm.weight"), ("'norm.weight' is missing",)),
    "hidden norm missing": (without("layers.0.hidden_norm.weight"), ("'layers.0.hidden_norm.weight' is missing",)),
    "tensor unknown": (having("layers.0.self_attn.sinks", 4), ("'layers.0.self_attn.sinks' is no part of",)),
    "layer too many": (
        having("layers.1.input_layernorm.weight", 64),
        ("'layers.1.input_layernorm.weight' is no",),
    ),
    "bias promised": (setting(attention_bias=True), ("attention_bias=true",)),
    "shape": (having("layers.0.self_attn.k_proj.weight", 32, 64), ("k_proj.weight", "[32, 128]", "[32, 64]")),
    "head shape": (having("lm_head.weight", 41, 64), ("lm_head.weight", "[40, 64]", "[41, 64]")),
    "head missing": (without("lm_head.weight"), ("'lm_head.weight' [40, 64] is missing", "[96, 64]")),
    "head tied": (
        both(without("lm_head.weight"), setting(tie_word_embeddings=True)),
        ("and the embedding is [96, 64]",),
    ),
    "kind": (lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), ("fc.weight", "F8_E4M3")),
    "not finite": (lambda c, t: t["fc.weight"].fill_(torch.nan), ("fc.weight", "not finite")),
    "other layers": (setting(model_type="deepseek_v3"), ("model_type='deepseek_v3'", "llama, qwen2, qwen3")),
    "activation": (setting(hidden_act="relu"), ("hidden_act='relu'",)),
    "window missing": (setting(layer_types=["sliding_attention"]), ("sliding_window",)),
    "layer types": (setting(layer_types=["chunked_attention"]), ("layer_types", "chunked_attention")),
    "mask token missing": (having("mask_hidden", 1, 1, 192), ("mask_token_id is missing",)),
    "mask token": (both(having("mask_hidden", 1, 1, 192), setting(mask_token_id=96)), ("mask_token_id=96", "0..95")),
    "speculators kind": (setting(speculators_model_type="dflash"), ("speculators_model_type='dflash'", "peagle")),
}

REFUSED_EAGLE: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "width": (setting(hidden_size=128), ("hidden_size=128", "target's is 64", "another target")),
    "vocabulary": (setting(vocab_size=97), ("vocab_size=97",)),
    "fc shape": (having("fc.weight", 64, 192), ("fc.weight", "[64, 128]", "[64, 192]")),
    "bias promised": (both(setting(bias=True), without("fc.bias")), ("bias=True, but tensor 'fc.bias' is missing",)),
    "bias denied": (setting(bias=False), ("bias=False, but tensor 'fc.bias' is there",)),
    "input norm": (having("layers.0.input_layernorm.weight", 64), ("'layers.0.input_layernorm.weight' is no part of",)),
    "final norm": (having("norm.weight", 64), ("'norm.weight' is no part of",)),
    "no head at all": (without("fc.weight"), ("neither an EAGLE head",)),
}


@pytest.mark.parametrize("case", REFUSED_EAGLE3)
def test_an_eagle3_head_is_refused(case: str, target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle3(1)
    edit, words = REFUSED_EAGLE3[case]
    edit(config, tensors)
    message = refusal(save(tmp_path, config, tensors), target)
    assert str(tmp_path) in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("case", REFUSED_EAGLE)
def test_an_eagle_head_is_refused(case: str, target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle(1)
    edit, words = REFUSED_EAGLE[case]
    edit(config, tensors)
    message = refusal(save(tmp_path, config, tensors), target)
    assert str(tmp_path) in message
    assert all(word in message for word in words), message


def test_the_usual_layers_collapse_for_a_small_target(target: Decoder, tmp_path: Path) -> None:
    small = load_model(write_gguf(hf_model("llama", num_hidden_layers=6), tmp_path / "target.gguf"))
    path = save(tmp_path / "head", *eagle3(1))
    assert "2, N/2 and N-3" in refusal(path, small)
    assert load_head(path, small, aux_layer_ids=[1, 3, 6]).config.taps == ((1, False), (3, False), (6, False))


@pytest.mark.parametrize(
    ("settings", "taps"),
    [
        ({}, [2, 4, 5]),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, [2, 4, 8]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, [2, 5, 7]),  # what leaves these layers: SpecForge
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}}, [3, 4, 6]),
        ({"eagle_config": {"layer_ids": [3, 4, 6]}}, [3, 4, 6]),
    ],
)
def test_the_layers_of_a_flat_checkpoint(
    settings: dict[str, Any], taps: list[int], target: Decoder, tmp_path: Path
) -> None:
    config, tensors = eagle3(1)
    path = save(tmp_path, config | settings, as_midlayer(tensors))
    assert [layer for layer, _ in read_head(path, target.config).taps] == taps
    assert [layer for layer, _ in load_head(path, target, aux_layer_ids=[1, 2, 3]).config.taps] == [1, 2, 3]


def test_speculators_layers_are_taken_as_they_are(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle3(1)
    nested = {"speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB, "transformer_layer_config": config}
    path = save(tmp_path, nested | {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}, tensors)
    assert [layer for layer, _ in read_head(path, target.config).taps] == [1, 4, 6]


def test_a_missing_residual_switch_is_taken_as_vllm_does_and_said(
    target: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = eagle3(1)
    nested = {"speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB, "transformer_layer_config": config}
    with caplog.at_level(logging.WARNING):
        head = read_head(save(tmp_path, nested, tensors), target.config)
    assert head.norm_before_residual
    assert "norm_before_residual is missing" in caplog.text
    assert not read_head(save(tmp_path / "flat", config, tensors), target.config).norm_before_residual


def test_a_head_without_aux_states_takes_the_last_one(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle3(1)
    del tensors["fc.weight"]
    path = save(tmp_path, config | {"eagle_config": {"use_aux_hidden_state": False}}, tensors)
    head = load_head(path, target)
    assert head.config.taps == ((NUM_LAYERS, True),)
    state = torch.randn(3, HIDDEN)
    assert torch.equal(head.combine([state]), state)


def test_windows_rope_and_length(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle3(1, num_hidden_layers=2)
    sliding = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
    head = load_head(save(tmp_path / "a", config | sliding, tensors), target)
    assert head.config.layers.sliding_windows == (None, 7)
    assert head.config.layers.rope.theta == 10_000.0  # where the key is missing, not the target's
    assert head.max_positions == target.max_positions == 128  # and not the 32 that the head was trained for
    older = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 7}
    assert read_head(save(tmp_path / "b", config | older, tensors), target.config).layers.sliding_windows == (None, 7)
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}}
    assert load_head(save(tmp_path / "c", config | yarn, tensors), target).max_positions == 32


def test_a_window_without_layer_types_is_said_to_have_no_effect(
    target: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = eagle3(1, sliding_window=7)
    with caplog.at_level(logging.WARNING):
        assert read_head(save(tmp_path, config, tensors), target.config).layers.sliding_windows == ()
    assert "sliding_window=7 has no effect" in caplog.text


def test_ends_are_shared_only_when_identical(target: Decoder, tmp_path: Path) -> None:
    assert isinstance(target.embedding, torch.Tensor)
    config, tensors = eagle3(1, draft_vocab_size=None)
    tensors |= {"embed_tokens.weight": target.embedding.clone(), "lm_head.weight": target.head.weight.clone()}
    head = load_head(save(tmp_path / "same", config, tensors), target)
    assert head.embedding is target.embedding
    assert head.head is target.head
    assert all("shared" in note for note in head.notes)

    tensors["embed_tokens.weight"][-1, -1] += 1e-3
    tensors["lm_head.weight"][0, 0] += 1e-3
    other = load_head(save(tmp_path / "other", config, tensors), target)
    assert torch.equal(other.embedding, tensors["embed_tokens.weight"])
    assert torch.equal(other.head.weight, tensors["lm_head.weight"])
    assert all("keeps its own" in note for note in other.notes)
    assert other.weight_bytes - head.weight_bytes == 2 * VOCAB * HIDDEN * 4

    for name in ("embed_tokens.weight", "lm_head.weight"):
        del tensors[name]
    bare = load_head(save(tmp_path / "bare", config, tensors), target)
    assert bare.embedding is target.embedding
    assert bare.head is target.head
    assert all("of its own" in note for note in bare.notes)


def test_a_tied_head_is_its_embedding(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle3(1, draft_vocab_size=None, tie_word_embeddings=True)
    del tensors["lm_head.weight"]
    head = load_head(save(tmp_path, config, tensors), target)
    assert head.head.weight is head.embedding


def test_an_eagle_head_uses_the_targets_output_head_whatever_its_config_copied(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle(1, tie_word_embeddings=True)
    tensors["embed_tokens.weight"] = random(torch.Generator().manual_seed(0), VOCAB, HIDDEN)
    assert load_head(save(tmp_path, config, tensors), target).head is target.head


def test_a_narrow_head_needs_its_own_embedding(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle3(1, hidden_size=32)
    del tensors["embed_tokens.weight"]
    assert "'embed_tokens.weight' is missing, and the target's is 64 wide, the head 32" in refusal(
        save(tmp_path, config, tensors), target
    )


@pytest.mark.skipif(not native.available(), reason="needs the CPU extension")
def test_beside_a_quantised_target_a_head_keeps_its_own_and_says_so(tmp_path: Path) -> None:
    model = hf_model("llama", seed=1, num_hidden_layers=NUM_LAYERS)
    path = write_gguf(model, tmp_path / "target.gguf", GGMLQuantizationType.Q8_0)
    quantised = load_model(path, packed=True)
    config, tensors = eagle3(1, draft_vocab_size=None)
    tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    tensors["lm_head.weight"] = quantised.head.weights[0].dequantize()  # the same values in another form
    head = load_head(save(tmp_path / "head", config, tensors), quantised, packed=True)
    assert torch.equal(head.embedding, tensors["embed_tokens.weight"])
    assert head.head is quantised.head
    assert "keeps its own embedding" in head.notes[0]
    assert "the target's is quantised (q8_0)" in head.notes[0]


@pytest.mark.skipif(not native.available(), reason="needs the CPU extension")
def test_bfloat16_and_int8_are_packed(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle3(1)
    halves = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    plain = load_head(save(tmp_path / "plain", config, tensors), target, packed=True)
    half = load_head(save(tmp_path / "half", config, halves), target, packed=True)
    pickled = load_head(save(tmp_path / "pickled", config, halves, pickled=True), target, packed=True)
    eighth = load_head(tmp_path / "plain", target, quantization="int8")
    assert plain.weight_bytes > 1.9 * half.weight_bytes > 3 * eighth.weight_bytes
    assert pickled.weight_bytes == half.weight_bytes
    with pytest.raises(ConfigError, match="quantization='fp4'"):
        load_head(tmp_path / "plain", target, quantization="fp4")


def test_shards_are_read(target: Decoder, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config, tensors = eagle3(1)
    save(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in shards.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    head = load_head(tmp_path, target)
    assert torch.equal(head.target_ids(torch.arange(DRAFT_VOCAB)), tensors["d2t"] + torch.arange(DRAFT_VOCAB))


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("echo harm",)


def test_a_pickle_runs_no_code(target: Decoder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, tensors = eagle(1)
    save(tmp_path, config, tensors | {"layers.0.extra": Harmful()}, pickled=True)  # type: ignore[dict-item]
    assert "not a file of tensors" in refusal(tmp_path, target)
    assert "harm" not in capfd.readouterr().out


def test_broken_files_are_named(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle(1)
    save(tmp_path, config, tensors, pickled=True)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:1000])
    assert "pytorch_model.bin" in refusal(tmp_path, target)
    torch.save([1, 2], file)
    assert "must hold named tensors" in refusal(tmp_path, target)
    file.unlink()
    assert "no *.safetensors file" in refusal(tmp_path, target)
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in refusal(tmp_path, target)
    assert "no such file" in refusal(tmp_path / "nothing", target)


@pytest.mark.parametrize("bias", [True, False])
def test_fc_bias_is_there_if_its_tensor_is_where_the_key_is_missing(
    bias: bool, target: Decoder, tmp_path: Path
) -> None:
    config, tensors = eagle(1, bias=bias)
    del config["bias"]
    assert read_head(save(tmp_path, config, tensors), target.config).fc_bias == bias


# GGUF


def test_a_gguf_head_says_what_it_needs(target: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, tensors = eagle3(1, norm_before_fc=True)
    options = {"norm_before_residual": True, "norm_before_fc": True, "target_layers": [1, 4, 8]}
    head = load_head(save_gguf(tmp_path / "head.gguf", config, tensors, **options), target)
    assert head.config.taps == ((1, False), (4, False), (8, False))
    assert "target_layers [1, 4, 8] are taken as layers that states enter" in caplog.text
    assert head.config.norm_before_residual
    assert head.config.norm_before_fc
    assert head.config.draft_vocab_size == DRAFT_VOCAB


def test_gguf_heads_are_refused_by_name(target: Decoder, tmp_path: Path) -> None:
    config, tensors = eagle3(1)
    path = tmp_path / "head.gguf"
    assert "general.architecture='dflash'" in refusal(save_gguf(path, config, tensors, architecture="dflash"), target)
    assert "target_layers must be" in refusal(save_gguf(path, config, tensors, target_layers=[2, 4, 9]), target)
    assert "target_hidden_size=128" in refusal(save_gguf(path, config, tensors, target_hidden_size=128), target)
    wrong = tensors | {"d2t": tensors["d2t"] + 90}
    assert "'d2t' must hold ascending target ids" in refusal(save_gguf(path, config, wrong), target)
    assert "'output_norm.weight' is missing" in refusal(
        save_gguf(path, config, {name: t for name, t in tensors.items() if name != "norm.weight"}), target
    )


# Vocabularies


def test_offsets_become_target_ids() -> None:
    offsets = torch.tensor([0, 0, 3, 3, 7])
    assert from_offsets(offsets, 5, 12).tolist() == [0, 1, 5, 6, 11]  # type: ignore[union-attr]
    assert from_offsets(torch.zeros(5, dtype=torch.int64), 5, 5) is None
    assert from_ids(torch.tensor([0, 1, 5]), 3, 12).tolist() == [0, 1, 5]  # type: ignore[union-attr]
    assert from_ids(torch.arange(5), 5, 5) is None


def test_sparse_offsets_are_believed_where_t2d_confirms_them() -> None:
    """Every second token: the offsets rise at each id, as absolute ids would."""
    offsets, marked = torch.arange(5), torch.zeros(12, dtype=torch.bool)
    marked[0:10:2] = True
    assert from_offsets(offsets, 5, 12, marked).tolist() == [0, 2, 4, 6, 8]  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="reads as absolute"):
        from_offsets(offsets, 5, 12)


@pytest.mark.parametrize("offsets", [[0, 0, 0, 0, 8], [-1, 0, 0, 0, 0], [0, 0, -1, 0, 0], [3, 0, 0, 0, 0]])
def test_offsets_out_of_range_or_order_are_refused(offsets: list[int]) -> None:
    with pytest.raises(CheckpointError, match="'d2t' must hold offsets"):
        from_offsets(torch.tensor(offsets), 5, 12)
