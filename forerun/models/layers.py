"""The parts of a decoder layer, as functions of tensors. No state, no cache, no scheduling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention import AttentionInputs, Rope
from forerun.kernels.fused import Experts, Linear, Merge, Mlp, PlainLinear, norm_linear
from forerun.kernels.packed import PackedLinear, PackedWeight
from forerun.models.config import DecoderConfig, RopeConfig

Weight = Tensor | PackedWeight | PackedLinear
"""A decoder's weight: vectors are tensors; the embedding a tensor or a PackedWeight; other matrices a tensor, their
bias apart, or a PackedLinear that has it."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; shapes in `DecoderConfig.layer_shapes`. Fused: q, k, v in `qkv`, gate, up in `mlp.gate_up`."""

    attn_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Linear
    output: Linear
    attn_merge: Merge
    mlp_norm: Tensor | None
    mlp: Mlp | Experts
    mlp_merge: Merge

    @classmethod
    def of(
        cls, weights: Mapping[str, Weight], config: DecoderConfig, layer: int, *, invariant: bool = False
    ) -> LayerWeights:
        """invariant: see `PlainLinear`."""
        prefix = f"layers.{layer}."

        def norm(name: str) -> Tensor | None:
            return vector_of(weights, prefix + name) if prefix + name in weights else None

        def merge(name: str) -> Merge:
            return Merge(norm(name), config.rms_norm_eps, config.residual_scale)

        mlp_of = _experts_of if config.has_experts(layer) else _mlp_of
        return cls(
            attn_norm=norm("attn_norm"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            qkv=linear_of(weights, f"{prefix}qkv", invariant),
            output=linear_of(weights, f"{prefix}output", invariant),
            attn_merge=merge("post_attn_norm"),
            mlp_norm=norm("mlp_norm"),
            mlp=mlp_of(weights, config, prefix, invariant),
            mlp_merge=merge("post_mlp_norm"),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, *self.mlp.linears


def _mlp_of(weights: Mapping[str, Weight], config: DecoderConfig, prefix: str, invariant: bool) -> Mlp:
    gate_up, down = (linear_of(weights, prefix + name, invariant) for name in ("gate_up", "down"))
    return Mlp(gate_up, down, config.activation)


def _experts_of(weights: Mapping[str, Weight], config: DecoderConfig, prefix: str, invariant: bool) -> Experts:
    moe = config.moe
    assert moe is not None
    experts = [_mlp_of(weights, config, f"{prefix}experts.{expert}.", invariant) for expert in range(moe.num_experts)]
    router = linear_of(weights, f"{prefix}router", invariant)
    return Experts(router, experts, moe.experts_per_token, moe.normalize)


def activation_terms(name: str) -> int:
    """int8 terms that the matrix `name` gets of an activation: two where rounding shows most in the logits for the
    share of the weights. docs/measurements.md says how much."""
    return 2 if name.endswith(".qkv") else 1


def linear_of(weights: Mapping[str, Weight], name: str, invariant: bool = False) -> Linear:
    """The matrix `name`, with `<name>_bias` if that is there. invariant: see `PlainLinear`."""
    weight = weights[name]
    if isinstance(weight, PackedLinear):
        return weight
    if isinstance(weight, PackedWeight):
        return PackedLinear([weight], terms=activation_terms(name))
    bias = vector_of(weights, f"{name}_bias") if f"{name}_bias" in weights else None
    return PlainLinear(weight, bias, invariant)


def vector_of(weights: Mapping[str, Weight], name: str) -> Tensor:
    vector = weights[name]
    assert isinstance(vector, Tensor), name
    return vector


def attention_inputs(
    hidden: Tensor, weights: LayerWeights, config: DecoderConfig, cos: Tensor, sin: Tensor
) -> AttentionInputs:
    """hidden [T, H], and cos, sin [T, R / 2] of the layer's rope."""
    eps = config.rms_norm_eps
    product = norm_linear(hidden, weights.attn_norm, eps, weights.qkv)
    rope = Rope(cos, sin, weights.q_norm, weights.k_norm, eps)
    return AttentionInputs(product, config.num_heads, config.num_kv_heads, rope)


def rope_tables(rope: RopeConfig, head_dim: int, max_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0..max_positions-1, [max_positions, R / 2]; computed in float32, then of the dtype of
    `like`, beside it."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, max_positions))
    scale = rope.attention_factor
    return (angles.cos() * scale).to(like), (angles.sin() * scale).to(like)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int = 0) -> Tensor:
    """Radians a position, [R / 2] float32, in the operations and the order of Hugging Face's.

    Args:
        max_positions: the longest sequence to be computed. It decides which factors longrope takes, once and for all:
            keys in a cache have been turned and cannot be turned again where a text grows long.
    """
    dim = rope.rotated(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / rope.theta**exponents
    stretched = rope.type == "longrope" and max_positions > rope.original_max_positions
    if factors := rope.long_factors if stretched else rope.frequency_factors:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float32)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, dim)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""
    rotations = rope.original_max_positions * frequencies / (2 * math.pi)  # over the original context
    kept = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """Source: YaRN, arXiv 2309.00071, section 3.2: a ramp over dimensions between plain and stretched."""
    low = _yarn_dimension(rope.beta_fast, rope, dim)
    high = _yarn_dimension(rope.beta_slow, rope, dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _yarn_dimension(rotations: float, rope: RopeConfig, dim: int) -> float:
    """The dimension, a real number, that turns so often over the original context."""
    wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(rope.theta))
