"""What a decoder is made of, as numbers. No torch here: `memory/` and `forerun plan` read it without weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forerun.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """How positions turn into angles. Names are those of Hugging Face's `rope_parameters`.

    Attributes:
        theta: base of the wavelengths.
        type: one of ROPE_TYPES.
        factor: by how much the context is stretched (linear, llama3, yarn).
        original_max_positions: context length before stretching (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's limits between stretched and plain wavelengths.
        beta_fast, beta_slow, truncate: yarn's limits, in rotations over the original context.
        attention_factor: cos and sin are multiplied by it (yarn).
        frequency_factors: [head_dim / 2] divisors of the frequencies; how GGUF files state llama3. () for none.
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise CheckpointError(f"rope type {self.type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _check_positive(f"rope {name}", getattr(self, name))
        _check_positive("rope attention_factor", self.attention_factor)
        for value in self.frequency_factors:
            _check_positive("rope frequency factor", value)
        if self.theta <= 1:
            raise CheckpointError(f"rope theta must be above 1, got {self.theta}")
        if self.type in ("llama3", "yarn"):
            _check_count("rope original_max_position_embeddings", self.original_max_positions)
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"rope high_freq_factor must be above low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: RMS norms, rotary positions, grouped-query attention, SiLU-gated MLP.

    Attributes:
        family: the key of `families.FAMILIES` it was read by.
        head_dim: need not be hidden_size / num_heads.
        max_position_embeddings: the longest context that the checkpoint is made for.
        tie_word_embeddings: the output head is the embedding.
        qkv_bias, output_bias, mlp_bias: whether those linears add a bias.
        qk_norm: each query and key head is RMS-normed before rope.
        eos_token_ids: tokens that end a text, the checkpoint's first choice first.
        sliding_windows: a layer's attention window in tokens, None for all; () where no layer has one.

    Raises:
        CheckpointError: sizes that do not fit together.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sliding_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            _check_count(name, getattr(self, name))
        _check_count("vocab_size", self.vocab_size)
        _check_count("max_position_embeddings", self.max_position_embeddings)
        _check_positive("rms_norm_eps", self.rms_norm_eps)
        if self.num_layers > MAX_LAYERS:
            raise CheckpointError(f"num_layers must be at most {MAX_LAYERS}, got {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even, got {self.head_dim}")
        if self.rope.frequency_factors and len(self.rope.frequency_factors) != self.head_dim // 2:
            raise CheckpointError(
                f"rope frequency factors: expected {self.head_dim // 2}, found {len(self.rope.frequency_factors)}"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise CheckpointError(f"sliding_windows: expected {self.num_layers}, found {len(self.sliding_windows)}")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer as the decoder holds them: q, k, v fused, gate and up fused."""
        hidden, heads, middle = self.hidden_size, self.query_size, self.intermediate_size
        qkv = heads + 2 * self.kv_size
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "qkv": (qkv, hidden),
            "output": (hidden, heads),
            "mlp_norm": (hidden,),
            "gate_up": (2 * middle, hidden),
            "down": (hidden, middle),
        }
        if self.qkv_bias:
            shapes["qkv_bias"] = (qkv,)
        if self.output_bias:
            shapes["output_bias"] = (hidden,)
        if self.mlp_bias:
            shapes |= {"gate_up_bias": (2 * middle,), "down_bias": (hidden,)}
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        return shapes

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the decoder: `embedding`, `norm`, `head` unless tied, and `layers.<i>.<name>`."""
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab_size, self.hidden_size),
            "norm": (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        layer = self.layer_shapes()
        shapes.update({f"layers.{i}.{name}": shape for i in range(self.num_layers) for name, shape in layer.items()})
        return shapes

    @property
    def num_parameters(self) -> int:
        """Weights held in memory; a tied head counts once."""
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) + self.hidden_size
        return ends + self.num_layers * sum(math.prod(shape) for shape in self.layer_shapes().values())

    def weight_bytes(self, bytes_per_element: int = 4) -> int:
        return self.num_parameters * bytes_per_element

    def kv_bytes_per_token(self, bytes_per_element: int = 4) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.kv_size * bytes_per_element


def _check_count(name: str, value: int) -> None:
    if not 1 <= value <= MAX_SIZE:
        raise CheckpointError(f"{name} must be in [1, {MAX_SIZE}], got {value}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{name} must be a positive number, got {value}")
