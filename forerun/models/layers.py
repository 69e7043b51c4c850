"""The parts of a decoder layer, as functions of tensors. No state, no cache, no scheduling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels import linear, rms_norm, rope, silu_mul
from forerun.models.config import DecoderConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors; shapes in `DecoderConfig.layer_shapes`. Fused: q, k, v in `qkv`, gate, up in `gate_up`."""

    attn_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], config: DecoderConfig, layer: int) -> LayerWeights:
        return cls(**{name: weights[f"layers.{layer}.{name}"] for name in config.layer_shapes()})


def attention_inputs(
    hidden: Tensor, weights: LayerWeights, config: DecoderConfig, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H] -> query [T, nh, D], key [T, nkv, D], both with rope, and value [T, nkv, D].

    Query and key are contiguous, value is a view of the fused product.
    """
    num_heads = config.num_heads + 2 * config.num_kv_heads
    normed = rms_norm(hidden, weights.attn_norm, config.rms_norm_eps)
    qkv = linear(normed, weights.qkv, weights.qkv_bias).view(hidden.shape[0], num_heads, config.head_dim)
    query, key, value = qkv.split_with_sizes((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
    if weights.q_norm is not None and weights.k_norm is not None:
        query = rms_norm(query, weights.q_norm, config.rms_norm_eps)
        key = rms_norm(key, weights.k_norm, config.rms_norm_eps)
    return rope(query, cos, sin), rope(key, cos, sin), value


def mlp(hidden: Tensor, weights: LayerWeights, config: DecoderConfig) -> Tensor:
    """hidden [T, H] -> what the gated MLP adds to it, [T, H]."""
    normed = rms_norm(hidden, weights.mlp_norm, config.rms_norm_eps)
    return linear(silu_mul(linear(normed, weights.gate_up, weights.gate_up_bias)), weights.down, weights.down_bias)


def rope_tables(config: DecoderConfig, max_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0..max_positions-1, [max_positions, head_dim / 2]; computed in float32."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
    scale = config.rope.attention_factor
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, [head_dim / 2] float32, in the operations and the order of Hugging Face's."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    rotations = rope.original_max_positions * frequencies / (2 * math.pi)  # over the original context
    kept = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Source: YaRN, arXiv 2309.00071, section 3.2: a ramp over dimensions between plain and stretched."""
    low = _yarn_dimension(rope.beta_fast, rope, head_dim)
    high = _yarn_dimension(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _yarn_dimension(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """The dimension, a real number, that turns so often over the original context."""
    wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))
