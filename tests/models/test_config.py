"""Configs: sizes that follow from them, and both spellings of rope."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun.errors import CheckpointError
from forerun.models.config import DecoderConfig, MoeConfig, RopeConfig
from forerun.models.families import FAMILIES, family_of
from forerun.models.families.hf import hf_rope
from forerun.models.families.values import Values
from forerun.models.layers import inverse_frequencies

from .tiny import hf_model

SIZES: dict[str, Any] = {
    "family": "llama",
    "hidden_size": 576,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def test_sizes_are_those_of_smollm2_135m() -> None:
    config = DecoderConfig(**SIZES)
    assert config.num_parameters == 134_515_008  # 162,826,560 untied
    assert config.weight_bytes(2) == 2 * 134_515_008
    assert config.kv_bytes_per_token(4) == 2 * 30 * 3 * 64 * 4


MOE = MoeConfig(num_experts=5, experts_per_token=2, intermediate_size=64, dense_layers=frozenset({0, 7}))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False, "qkv_bias": True, "mlp_bias": True},
    {"qk_norm": "row", "pre_norms": False, "post_norms": True},
    {"qk_norm": "head", "post_norms": True, "moe": MOE},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_s_tensors_fill_ours_exactly(family: str, options: dict[str, Any]) -> None:
    if family not in ("gemma2", "gemma3_text", "gemma3", "olmo2"):  # they have no names for these
        options = {key: value for key, value in options.items() if key != "post_norms"}
    if FAMILIES[family].fused == {}:  # they have no biases, and their parts no names
        options = {key: value for key, value in options.items() if not key.endswith("bias") and key != "moe"}
    config = DecoderConfig(**SIZES | options | {"family": family})
    shapes = config.weight_shapes()
    assert config.num_parameters == sum(torch.Size(shape).numel() for shape in shapes.values())
    for slots in (FAMILIES[family].hf_slots(config), FAMILIES[family].gguf_slots(config)):
        filled = dict.fromkeys(shapes, 0)
        for slot in slots.values():
            assert slot.start == filled[slot.tensor]
            assert slot.shape[1:] == shapes[slot.tensor][1:]
            filled[slot.tensor] += slot.shape[0]
        assert filled == {name: shape[0] for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 2},
        {"head_dim": 7},
        {"vocab_size": 0},
        {"num_layers": 10**9},
        {"rms_norm_eps": 0.0},
        {"sliding_windows": (None,)},
        {"sliding_windows": (0,) * 30},
        {"residual_scale": -1.0},
        {"logits_softcap": 0.0},
        {"attention_scale": float("inf")},
        {"sliding_rope": RopeConfig(dim=66)},
        {"rope": RopeConfig(dim=7)},
        {"rope": RopeConfig(type="longrope", original_max_positions=8, frequency_factors=(1.0,) * 32)},
        {"rope": RopeConfig(frequency_factors=(1.0, 2.0))},
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        DecoderConfig(**SIZES | changes)


def test_an_unknown_family_is_refused_with_the_list() -> None:
    with pytest.raises(
        CheckpointError, match=r"model_type='mamba' is not supported; supported: llama, mistral, qwen2, "
    ):
        family_of("mamba", "model_type")


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 0.5, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3},
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_both_spellings_of_rope_mean_what_transformers_means(scaling: dict[str, Any]) -> None:
    common = {"max_position_embeddings": 256}
    new = hf_rope(Values(common | {"rope_parameters": scaling | {"rope_theta": 5000.0}}))
    old_scaling = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    old = hf_rope(Values(common | {"rope_theta": 5000.0, "rope_scaling": old_scaling}))
    assert new == old
    config = hf_model("llama", **common, rope_parameters=scaling | {"rope_theta": 5000.0}).config
    if scaling["rope_type"] == "default":
        expected, factor = 1.0 / 5000.0 ** (torch.arange(0, 16, 2) / 16), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    torch.testing.assert_close(inverse_frequencies(new, 16), expected, rtol=1e-6, atol=0)
    assert new.attention_factor == pytest.approx(factor)


def test_a_null_rope_scaling_is_no_scaling() -> None:
    values = {"max_position_embeddings": 256, "rope_theta": 7.0, "rope_scaling": None}
    assert hf_rope(Values(values)) == RopeConfig(theta=7.0)


def test_reading_a_config_needs_no_torch() -> None:
    code = "import sys, forerun.models.config, forerun.models.families; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
