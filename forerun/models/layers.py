"""The parts of a decoder layer, as functions of tensors. No state, no cache, no scheduling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.fused import Linear, PlainLinear, norm_linear, rope_qk
from forerun.kernels.fused import mlp as fused_mlp
from forerun.kernels.packed import PackedLinear, PackedWeight
from forerun.models.config import DecoderConfig, RopeConfig

Weight = Tensor | PackedWeight | PackedLinear
"""A decoder's weight: vectors are tensors; the embedding a tensor or a PackedWeight; other matrices a tensor, their
bias apart, or a PackedLinear that has it."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; shapes in `DecoderConfig.layer_shapes`. Fused: q, k, v in `qkv`, gate, up in `gate_up`."""

    attn_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Weight], layer: int) -> LayerWeights:
        prefix = f"layers.{layer}."
        linears = {name: linear_of(weights, prefix + name) for name in ("qkv", "output", "gate_up", "down")}
        names = [name for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm") if prefix + name in weights]
        return cls(**linears, **{name: vector_of(weights, prefix + name) for name in names})  # type: ignore[arg-type]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


def activation_terms(name: str) -> int:
    """int8 terms that the matrix `name` gets of an activation: two where rounding shows most in the logits for the
    share of the weights. docs/measurements.md says how much."""
    return 2 if name.endswith(".qkv") else 1


def linear_of(weights: Mapping[str, Weight], name: str) -> Linear:
    """The matrix `name`, with `<name>_bias` if that is there."""
    weight = weights[name]
    if isinstance(weight, PackedLinear):
        return weight
    if isinstance(weight, PackedWeight):
        return PackedLinear([weight], terms=activation_terms(name))
    return PlainLinear(weight, vector_of(weights, f"{name}_bias") if f"{name}_bias" in weights else None)


def vector_of(weights: Mapping[str, Weight], name: str) -> Tensor:
    vector = weights[name]
    assert isinstance(vector, Tensor), name
    return vector


def attention_inputs(
    hidden: Tensor, weights: LayerWeights, config: DecoderConfig, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H] -> query [T, nh, D], key [T, nkv, D], both with rope, and value [T, nkv, D].

    All are views of the fused product: a row's heads are contiguous, rows are not.
    """
    heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
    qkv = norm_linear(hidden, weights.attn_norm, eps, weights.qkv)
    rope_qk(qkv, cos, sin, heads, kv_heads, weights.q_norm, weights.k_norm, eps)
    query, key, value = qkv.view(hidden.shape[0], heads + 2 * kv_heads, config.head_dim).split_with_sizes(
        (heads, kv_heads, kv_heads), 1
    )
    return query, key, value


def mlp(hidden: Tensor, weights: LayerWeights, config: DecoderConfig) -> None:
    """Add the gated MLP to hidden [T, H], in place."""
    fused_mlp(hidden, weights.mlp_norm, config.rms_norm_eps, weights.gate_up, weights.down)


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
