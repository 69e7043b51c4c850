"""Qwen3 with experts: Qwen3, but the MLP of most layers is a choice of experts."""

from __future__ import annotations

from forerun.errors import CheckpointError
from forerun.models.config import MAX_LAYERS, DecoderConfig, MoeConfig
from forerun.models.families.base import Family, GgufHeader
from forerun.models.families.gguf import gguf_config, gguf_uniform
from forerun.models.families.hf import hf_config, hf_windows
from forerun.models.families.values import Values

NAME = "qwen3_moe"
SOFTMAX = 1  # llama.cpp's number for a softmax over the router's scores


def from_hf(values: Values) -> DecoderConfig:
    bias = values.flag("attention_bias", False)
    return hf_config(
        values,
        NAME,
        head_dim=values.integer("head_dim", 128),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        sliding_windows=hf_windows(values, enabled=values.flag("use_sliding_window", False)),
        moe=hf_moe(values),
    )


def hf_moe(values: Values) -> MoeConfig | None:
    num_experts = values.integer("num_experts", values.integer("num_local_experts", 128))
    if num_experts == 0:
        return None
    step = values.integer("decoder_sparse_step", 1)
    if step < 1:
        raise CheckpointError(f"decoder_sparse_step must be at least 1, got {step}")
    num_layers = min(values.integer("num_hidden_layers"), MAX_LAYERS)
    dense = values.token_ids("mlp_only_layers")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=values.integer("num_experts_per_tok"),
        intermediate_size=values.integer("moe_intermediate_size"),
        normalize=values.flag("norm_topk_prob", False),
        dense_layers=frozenset(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    )


def from_gguf(header: GgufHeader) -> DecoderConfig:
    """llama.cpp knows this family with experts in all layers and with normalised weights only."""
    values = header.values
    values.refuse("expert_gating_func", (0, SOFTMAX))
    values.refuse("expert_shared_count", (0,))
    values.refuse("expert_weights_scale", (0.0, 1.0))
    middle = gguf_uniform(values, "expert_feed_forward_length")
    return gguf_config(
        header,
        NAME,
        intermediate_size=middle,
        qk_norm="head",
        moe=MoeConfig(
            num_experts=values.integer("expert_count"),
            experts_per_token=values.integer("expert_used_count"),
            intermediate_size=middle,
            normalize=values.flag("expert_weights_norm", True),
        ),
    )


FAMILY = Family(name=NAME, gguf_name="qwen3moe", from_hf=from_hf, from_gguf=from_gguf)
