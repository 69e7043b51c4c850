"""What families share in reading config.json."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from forerun.errors import CheckpointError
from forerun.models.config import MAX_LAYERS, MAX_SIZE, DecoderConfig, RopeConfig
from forerun.models.families.values import Values

HF_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
LAYER_TYPES = ("full_attention", "sliding_attention")


def hf_config(
    values: Values,
    family: str,
    *,
    head_dim: int | None,
    rope: RopeConfig | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    tied: bool = False,
    eps: float = 1e-6,
    **differences: Any,
) -> DecoderConfig:
    """The keys of config.json that all families share; the keywords are what only this family says.

    Args:
        activation_key, activation: where the activation stands, and which one the family has.
        tied, eps: whether the head is the embedding, and the norms' epsilon, where the checkpoint does not say.
    """
    values.refuse(activation_key, HF_ACTIVATIONS[activation])
    if quantization := values.mapping("quantization_config"):
        raise CheckpointError(f"quantization_config {quantization.get('quant_method')!r} is not supported")
    num_heads = values.integer("num_attention_heads")
    hidden_size = values.integer("hidden_size")
    return DecoderConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=values.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=values.integer("num_key_value_heads", num_heads),
        head_dim=hidden_size // max(num_heads, 1) if head_dim is None else head_dim,
        intermediate_size=values.integer("intermediate_size"),
        vocab_size=values.integer("vocab_size"),
        max_position_embeddings=values.integer("max_position_embeddings"),
        rms_norm_eps=values.number("rms_norm_eps", eps),
        rope=rope or hf_rope(values),
        tie_word_embeddings=values.flag("tie_word_embeddings", tied),
        activation=activation,
        eos_token_ids=values.token_ids("eos_token_id"),
        bos_token_id=next(iter(values.token_ids("bos_token_id")), None),
        **differences,
    )


def hf_windows(
    values: Values, default: Callable[[int], bool] | None = None, enabled: bool = True
) -> tuple[int | None, ...]:
    """Windows by `sliding_window` and `layer_types`.

    Args:
        default: whether a layer has the window where the checkpoint does not list its layers; None: of a family that
            lists none, for all have it.
        enabled: whether there are windows at all.
    """
    num_layers = values.integer("num_hidden_layers")
    window = values.optional_integer("sliding_window")
    kinds = values.get("layer_types")
    if kinds is None:
        sliding = [default is None or default(layer) for layer in range(min(num_layers, MAX_LAYERS))]
    elif default is None:
        raise CheckpointError("layer_types is not supported for this model_type: all of its layers are alike")
    elif not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"layer_types must be a list of {num_layers}, got {reprlib.repr(kinds)}")
    else:
        for kind in kinds:
            if kind not in LAYER_TYPES:
                raise CheckpointError(f"layer_types: {kind!r} is not supported; supported: {', '.join(LAYER_TYPES)}")
        sliding = [kind == "sliding_attention" for kind in kinds]
    if not enabled or window is None or not any(sliding):
        return ()
    return tuple(window if slides else None for slides in sliding)


def hf_rope(values: Values, head_dim: int | None = None, aliases: Mapping[str, str] | None = None) -> RopeConfig:
    """Rope in the spelling of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

    Args:
        head_dim: for a family that may rotate a part of a head; None: for others, which refuse that.
        aliases: a family's own names of rope types.
    """
    rope = Values(values.mapping("rope_scaling") or values.mapping("rope_parameters"))
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise CheckpointError("rope_parameters per layer type are not supported")
    share = rope.number("partial_rotary_factor", values.number("partial_rotary_factor", 1.0))
    if share != 1.0 and (head_dim is None or not 0 < share < 1):
        raise CheckpointError(f"partial_rotary_factor={share} is not supported")
    dim = None if share == 1.0 or head_dim is None else int(min(head_dim, MAX_SIZE) * share)
    theta = values.number("rope_theta", 10_000.0)
    return hf_rope_of(rope, values, theta, dim, aliases or {})


def hf_rope_of(
    rope: Values, values: Values, theta: float, dim: int | None = None, aliases: Mapping[str, str] | None = None
) -> RopeConfig:
    """One object of rope's parameters, in a checkpoint's values; theta where it does not say."""
    theta = rope.number("rope_theta", theta)
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = (aliases or {}).get(kind, kind)
    max_positions = values.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", max_positions)
    original = values.integer("original_max_position_embeddings", original)
    if kind == "linear":
        return RopeConfig(theta=theta, type=kind, dim=dim, factor=rope.number("factor"))
    if kind == "longrope":
        return RopeConfig(
            theta=theta,
            type=kind,
            dim=dim,
            original_max_positions=original,
            frequency_factors=rope.numbers("short_factor"),
            long_factors=rope.numbers("long_factor"),
            attention_factor=_longrope_attention_factor(rope, max_positions, original),
        )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            type=kind,
            dim=dim,
            factor=rope.number("factor"),
            original_max_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = rope.number("factor", max_positions / max(original, 1))
        return RopeConfig(
            theta=theta,
            type=kind,
            dim=dim,
            factor=factor,
            original_max_positions=original,
            beta_fast=rope.number("beta_fast", 0.0) or 32.0,
            beta_slow=rope.number("beta_slow", 0.0) or 1.0,
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    return RopeConfig(theta=theta, type=kind, dim=dim)


def _longrope_attention_factor(rope: Values, max_positions: int, original: int) -> float:
    """Source: LongRoPE, arXiv 2402.13753, and Phi-3's report: the entropy of attention over a longer context."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    factor = rope.number("factor", max_positions / max(original, 1))
    return 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_attention_factor(rope: Values, factor: float) -> float:
    """YaRN's temperature of the attention, arXiv 2309.00071 section 3.4, with DeepSeek's two scales."""
    if (given := rope.get("attention_factor")) is not None:
        return rope.number("attention_factor", given)
    scale, scale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if scale and scale_all:
        return yarn_mscale(factor, scale) / yarn_mscale(factor, scale_all)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
