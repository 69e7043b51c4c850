"""What families share in reading the metadata of GGUF files."""

from __future__ import annotations

import reprlib
from typing import Any

from forerun.errors import CheckpointError
from forerun.models.config import MAX_LAYERS, DecoderConfig, RopeConfig
from forerun.models.families.base import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS, GgufHeader
from forerun.models.families.hf import yarn_mscale
from forerun.models.families.values import REQUIRED, Values


def gguf_config(
    header: GgufHeader, family: str, *, rope: RopeConfig | None = None, **differences: Any
) -> DecoderConfig:
    """The keys of GGUF metadata that all families share. Biases and the head are there if their tensors are.

    Args:
        rope: of a family that may rotate a part of a head; others refuse that.
    """
    general, values, shapes = header.general, header.values, header.shapes
    num_heads = gguf_uniform(values, "attention.head_count")
    hidden_size = values.integer("embedding_length")
    head_dim = gguf_head_dim(values)
    values.refuse("attention.value_length", (head_dim,))
    max_positions = values.integer("context_length")
    if rope is None:
        values.refuse("rope.dimension_count", (head_dim,))
        rope = gguf_rope(header)
    window = values.integer("attention.sliding_window", 0)
    if "sliding_windows" not in differences and 0 < window < max_positions:
        raise CheckpointError(f"{values.prefix}attention.sliding_window={window} is not supported for {family}")
    config: dict[str, Any] = {
        "family": family,
        "hidden_size": hidden_size,
        "num_layers": values.integer("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": gguf_uniform(values, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": gguf_uniform(values, "feed_forward_length"),
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "max_position_embeddings": max_positions,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope": rope,
        "tie_word_embeddings": "output.weight" not in shapes,
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "output_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
        "eos_token_ids": _gguf_end_tokens(general),
        "bos_token_id": next(iter(general.token_ids("tokenizer.ggml.bos_token_id")), None),
    }
    return DecoderConfig(**(config | differences))


def gguf_head_dim(values: Values) -> int:
    num_heads = gguf_uniform(values, "attention.head_count")
    return values.integer("attention.key_length", values.integer("embedding_length") // max(num_heads, 1))


def gguf_windows(values: Values, default_period: int = 1) -> tuple[int | None, ...]:
    """Windows by `attention.sliding_window` and its pattern: of `period` layers the last has none, or a flag a layer.

    Args:
        default_period: of the family, where the file does not say; 1: all layers have it.
    """
    window = values.integer("attention.sliding_window", 0)
    num_layers = min(values.integer("block_count"), MAX_LAYERS)
    key = "attention.sliding_window_pattern"
    pattern = values.get(key, default_period)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(isinstance(slides, bool) for slides in pattern):
            raise CheckpointError(f"{values.prefix}{key} must be {num_layers} flags, got {reprlib.repr(pattern)}")
        sliding = pattern
    else:
        period = values.integer(key, default_period)
        sliding = [period <= 1 or layer % period < period - 1 for layer in range(num_layers)]
    return tuple(window if slides else None for slides in sliding) if window else ()


def _gguf_end_tokens(general: Values) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for key in keys for token in general.token_ids(key)))


def gguf_uniform(values: Values, key: str, default: Any = REQUIRED) -> int:
    """An integer that may be written once a layer."""
    value = values.get(key)
    if not isinstance(value, list):
        return values.integer(key, default)
    if len(set(value)) != 1:
        raise CheckpointError(f"{values.prefix}{key} differs between layers: not supported")
    return Values({key: value[0]}).integer(key)


def gguf_rope(header: GgufHeader, theta: float = 10_000.0) -> RopeConfig:
    """theta where the file does not say. llama3's and longrope's scalings are tensors, not metadata."""
    values, factors = header.values, header.rope_factors
    max_positions = values.integer("context_length")
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        values.refuse(key, (0.0, 1.0))
    theta = values.number("rope.freq_base", theta)
    linear = values.number("rope.scale_linear", 1.0)
    kind = values.text("rope.scaling.type", "linear" if linear != 1.0 else "none")
    if kind == "longrope" or LONG_FACTORS in factors:
        return RopeConfig(
            theta=theta,
            type="longrope",
            original_max_positions=values.integer("rope.scaling.original_context_length", max_positions),
            frequency_factors=factors.get(SHORT_FACTORS, ()),
            long_factors=factors.get(LONG_FACTORS, ()),
            attention_factor=values.number("rope.scaling.attn_factor", 1.0),
        )
    frequency_factors = factors.get(FREQUENCY_FACTORS, ())
    if kind == "none":
        return RopeConfig(theta=theta, frequency_factors=frequency_factors)
    factor = values.number("rope.scaling.factor", linear)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            type=kind,
            factor=factor,
            original_max_positions=values.integer("rope.scaling.original_context_length", max_positions),
            beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=yarn_mscale(factor) * values.number("rope.scaling.attn_factor", 1.0),
            frequency_factors=frequency_factors,
        )
    return RopeConfig(theta=theta, type=kind, factor=factor, frequency_factors=frequency_factors)
