"""What a decoder is made of, as numbers. No torch here: `memory/` and `forerun plan` read it without weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forerun.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS = ("silu", "gelu_tanh")
QK_NORMS = ("head", "row")
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """How positions turn into angles. Names are those of Hugging Face's `rope_parameters`.

    Attributes:
        theta: base of the wavelengths.
        type: one of ROPE_TYPES.
        dim: how many values of a head are rotated, the first of them; None: all.
        factor: by how much the context is stretched (linear, llama3, yarn).
        original_max_positions: context length before stretching (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: llama3's limits between stretched and plain wavelengths.
        beta_fast, beta_slow, truncate: yarn's limits, in rotations over the original context.
        attention_factor: cos and sin are multiplied by it (yarn, longrope).
        frequency_factors: [dim / 2] divisors of the frequencies; how GGUF files state llama3, and those of longrope
            within the original context. () for none.
        long_factors: the same where longer sequences are to be computed (longrope).
    """

    theta: float = 10_000.0
    type: str = "default"
    dim: int | None = None
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise CheckpointError(f"rope type {self.type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _check_positive(f"rope {name}", getattr(self, name))
        _check_positive("rope attention_factor", self.attention_factor)
        for value in (*self.frequency_factors, *self.long_factors):
            _check_positive("rope frequency factor", value)
        if self.theta <= 1:
            raise CheckpointError(f"rope theta must be above 1, got {self.theta}")
        if self.type in ("llama3", "yarn", "longrope"):
            _check_count("rope original_max_position_embeddings", self.original_max_positions)
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"rope high_freq_factor must be above low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )

    def rotated(self, head_dim: int) -> int:
        """How many values of a head are rotated."""
        return head_dim if self.dim is None else self.dim

    def check(self, head_dim: int) -> None:
        """Fail unless it can turn heads of that size."""
        dim = self.rotated(head_dim)
        if not 2 <= dim <= head_dim or dim % 2:
            raise CheckpointError(f"rope must turn an even number of a head's {head_dim} values, got {dim}")
        needed = (dim // 2,) if self.type == "longrope" else (0, dim // 2)
        if len(self.frequency_factors) not in needed:
            raise CheckpointError(f"rope frequency factors: expected {dim // 2}, found {len(self.frequency_factors)}")
        expected = dim // 2 if self.type == "longrope" else 0
        if len(self.long_factors) != expected:
            raise CheckpointError(f"rope long factors: expected {expected}, found {len(self.long_factors)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Layers whose MLP is a choice of experts: a router scores them, each token goes through its best.

    Attributes:
        experts_per_token: how many; their outputs are added, weighted by the softmax of the scores.
        intermediate_size: of one expert.
        normalize: the weights of a token's experts are scaled to add up to 1.
        dense_layers: layers that have a plain MLP instead.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        _check_count("num_experts", self.num_experts)
        _check_count("moe_intermediate_size", self.intermediate_size)
        if self.num_experts > MAX_EXPERTS:
            raise CheckpointError(f"num_experts must be at most {MAX_EXPERTS}, got {self.num_experts}")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise CheckpointError(
                f"num_experts_per_tok must be in [1, {self.num_experts}], got {self.experts_per_token}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: RMS norms, rotary positions, grouped-query attention, gated MLPs.

    With x the residual stream, a layer is
        x += residual_scale * post_norm(attention(pre_norm(x))), then the same with its MLP,
    where any of the norms may be missing; logits are capped(head(norm(x)) / logits_scale).

    Attributes:
        family: the key of `families.FAMILIES` it was read by.
        head_dim: need not be hidden_size / num_heads.
        max_position_embeddings: the longest context that the checkpoint is made for.
        tie_word_embeddings: the output head is the embedding.
        qkv_bias, output_bias, mlp_bias: whether those linears add a bias.
        qk_norm: queries and keys are RMS-normed before rope: each "head", or a "row" of all heads; None: not.
        pre_norms, post_norms: what goes into attention and MLP is normed; what comes out of them.
        activation: of the gate, one of ACTIVATIONS.
        embedding_scale, residual_scale, logits_scale: see above; embeddings are multiplied by theirs.
        logits_softcap, attention_softcap: x becomes cap * tanh(x / cap), for logits and for attention's scores.
        attention_scale: scores are query times key times this; None: 1 / sqrt(head_dim).
        eos_token_ids: tokens that end a text, the checkpoint's first choice first.
        sliding_windows: a layer's attention window in tokens, None for all; () where no layer has one.
        sliding_rope: rope of the layers that have a window; None: as all.
        moe: layers with experts.

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
    qk_norm: str | None = None
    pre_norms: bool = True
    post_norms: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    attention_softcap: float | None = None
    attention_scale: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sliding_windows: tuple[int | None, ...] = ()
    sliding_rope: RopeConfig | None = None
    moe: MoeConfig | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            _check_count(name, getattr(self, name))
        _check_count("vocab_size", self.vocab_size)
        _check_count("max_position_embeddings", self.max_position_embeddings)
        for name in ("rms_norm_eps", "embedding_scale", "residual_scale", "logits_scale"):
            _check_positive(name, getattr(self, name))
        for name in ("logits_softcap", "attention_softcap", "attention_scale"):
            if (value := getattr(self, name)) is not None:
                _check_positive(name, value)
        assert self.activation in ACTIVATIONS
        assert self.qk_norm is None or self.qk_norm in QK_NORMS
        if self.num_layers > MAX_LAYERS:
            raise CheckpointError(f"num_layers must be at most {MAX_LAYERS}, got {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even, got {self.head_dim}")
        for rope in self.ropes:
            rope.check(self.head_dim)
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise CheckpointError(f"sliding_windows: expected {self.num_layers}, found {len(self.sliding_windows)}")
        for window in self.sliding_windows:
            if window is not None:
                _check_count("sliding_window", window)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """That of all layers or of those without a window; then that of those with one, where it is another."""
        return (self.rope,) if self.sliding_rope is None else (self.rope, self.sliding_rope)

    def rope_index(self, layer: int) -> int:
        """Which of `ropes` the layer has."""
        windowed = bool(self.sliding_windows) and self.sliding_windows[layer] is not None
        return 1 if windowed and self.sliding_rope is not None else 0

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer as the decoder holds them: q, k, v fused, gate and up fused."""
        hidden, heads = self.hidden_size, self.query_size
        qkv = heads + 2 * self.kv_size
        shapes: dict[str, tuple[int, ...]] = {"qkv": (qkv, hidden), "output": (hidden, heads)}
        if self.pre_norms:
            shapes |= {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
        if self.post_norms:
            shapes |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
        if self.qkv_bias:
            shapes["qkv_bias"] = (qkv,)
        if self.output_bias:
            shapes["output_bias"] = (hidden,)
        if self.qk_norm == "head":
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        elif self.qk_norm == "row":
            shapes |= {"q_norm": (heads,), "k_norm": (self.kv_size,)}
        return shapes | self._mlp_shapes(layer)

    def _mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, middle = self.hidden_size, self.intermediate_size
        if self.moe is not None and self.has_experts(layer):
            shapes: dict[str, tuple[int, ...]] = {"router": (self.moe.num_experts, hidden)}
            for expert in range(self.moe.num_experts):
                shapes[f"experts.{expert}.gate_up"] = (2 * self.moe.intermediate_size, hidden)
                shapes[f"experts.{expert}.down"] = (hidden, self.moe.intermediate_size)
            return shapes
        shapes = {"gate_up": (2 * middle, hidden), "down": (hidden, middle)}
        if self.mlp_bias:
            shapes |= {"gate_up_bias": (2 * middle,), "down_bias": (hidden,)}
        return shapes

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the decoder: `embedding`, `norm`, `head` unless tied, and `layers.<i>.<name>`."""
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab_size, self.hidden_size),
            "norm": (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self.layer_shapes(layer).items()}
        return shapes

    @property
    def num_parameters(self) -> int:
        """Weights held in memory; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def weight_bytes(self, bytes_per_element: int = 4) -> int:
        return self.num_parameters * bytes_per_element

    def kv_bytes_per_token(self, bytes_per_element: int = 4) -> int:
        """Keys and values of one token in all layers. A window frees none of them: blocks are kept to the end."""
        return 2 * self.num_layers * self.kv_size * bytes_per_element


def _check_count(name: str, value: int) -> None:
    if not 1 <= value <= MAX_SIZE:
        raise CheckpointError(f"{name} must be in [1, {MAX_SIZE}], got {value}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{name} must be a positive number, got {value}")
