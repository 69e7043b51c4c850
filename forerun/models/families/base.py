"""What a family file is made of: typed reading of a checkpoint's metadata, and where each of its tensors goes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.errors import CheckpointError
from forerun.models.config import MAX_LAYERS, MAX_SIZE, DecoderConfig, RopeConfig

REQUIRED: Any = object()

# Keys of config.json by which some family changes the maths, and values that change nothing. A family that does not
# read one of them would compute something else than its author meant.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "logits_scaling": (1.0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1.0,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
}
GGUF_SWITCHES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
}
HF_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
LAYER_TYPES = ("full_attention", "sliding_attention")


class Values:
    """A checkpoint's metadata, read with its types checked. A missing or null key gives the default.

    Attributes:
        read: the keys that were asked for.

    Raises (every getter):
        CheckpointError: the key is missing and has no default, or its value is of another type.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise CheckpointError(f"{self.prefix}{key} is missing")
        return default

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        value: int = self._typed(key, default, "an integer", _is_integer)
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        value = self._typed(key, default, "a number", _is_number)
        try:
            return float(value)
        except OverflowError:
            raise self._error(key, value, "a number") from None

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value: bool = self._typed(key, default, "true or false", lambda v: isinstance(v, bool))
        return value

    def text(self, key: str, default: Any = REQUIRED) -> str:
        value: str = self._typed(key, default, "a string", lambda v: isinstance(v, str))
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = self._typed(key, {}, "an object", lambda v: isinstance(v, dict))
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._typed(key, [], "a list of numbers", lambda v: isinstance(v, list) and all(map(_is_number, v)))
        return tuple(map(float, value))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.get(key, [])
        ids = list(value) if isinstance(value, list | tuple) else [value]
        if not all(_is_integer(i) and i >= 0 for i in ids):
            raise self._error(key, value, "a token id or a list of them")
        return tuple(ids)

    def refuse(self, key: str, harmless: Collection[Any]) -> None:
        """Fail unless the key is missing, null or one of the harmless values."""
        value = self.get(key)
        if value is not None and value not in harmless:
            raise CheckpointError(f"{self.prefix}{key}={reprlib.repr(value)} is not supported")

    def refuse_unread(self, switches: Mapping[str, tuple[Any, ...]]) -> None:
        """Fail where the checkpoint sets one of these keys, and not to a harmless value, and nobody asked for it."""
        for key, harmless in switches.items():
            if key not in self.read:
                self.refuse(key, harmless)

    def _typed(self, key: str, default: Any, what: str, check: Callable[[Any], bool]) -> Any:
        value = self.get(key, default)
        if value is not default and not check(value):
            raise self._error(key, value, what)
        return value

    def _error(self, key: str, value: Any, what: str) -> CheckpointError:
        return CheckpointError(f"{self.prefix}{key} must be {what}, got {reprlib.repr(value)}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a checkpoint's tensor goes.

    Attributes:
        tensor: our name, a key of `DecoderConfig.weight_shapes`.
        start: the first of our tensor's rows that it fills.
        shape: the shape it must have.
        interleaved_heads: rows come in this many heads, in each of which the two halves that rope rotates are
            interleaved (llama.cpp's order for Llama); 0 for halves that stand one after the other.
        added: to the checkpoint's values, which lack it.
    """

    tensor: str
    start: int
    shape: tuple[int, ...]
    interleaved_heads: int = 0
    added: float = 0.0


# Names of the tensors; `{expert}` is the number of an expert, `name[i]` matrix i of a tensor of three axes.
HF_NAMES = {"embedding": "embed_tokens.weight", "norm": "norm.weight", "head": "lm_head.weight"}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down": "mlp.down_proj.weight",
    "down_bias": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
    "expert.gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert.up": "mlp.experts.{expert}.up_proj.weight",
    "expert.down": "mlp.experts.{expert}.down_proj.weight",
}
# Where what comes out of attention and MLP is normed too, post_attention_layernorm is what its name says.
HF_POST_NORM_NAMES = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}

GGUF_NAMES = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
GGUF_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "output": "attn_output.weight",
    "output_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down": "ffn_down.weight",
    "down_bias": "ffn_down.bias",
    "post_attn_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    "expert.gate": "ffn_gate_exps.weight[{expert}]",
    "expert.up": "ffn_up_exps.weight[{expert}]",
    "expert.down": "ffn_down_exps.weight[{expert}]",
}

FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS = ROPE_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)

# Parts of our fused tensors, in row order.
FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its weights.

    Attributes:
        general: all metadata. values: the metadata under the architecture's prefix.
        shapes: of all tensors.
        rope_factors: the small tensors that rope is scaled by, those of ROPE_FACTORS that are there.
    """

    general: Values
    values: Values
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: how to read its config and where to find its tensors, in Hugging Face and in GGUF files.

    Attributes:
        name: `model_type` of config.json.
        gguf_name: `general.architecture` of a GGUF file; None: llama.cpp writes it as another family.
        from_hf: config.json -> config.
        from_gguf: header of a GGUF file -> config.
        hf_prefixes: what the names of a Hugging Face checkpoint may begin with, left out in ours; the first that fits.
        hf_ignored: pattern of further names that may be there and carry nothing of the text model.
        gguf_interleaves_heads: llama.cpp's conversion reorders the rows of q and k.
        fused: parts of our fused tensors that a checkpoint stores apart, in row order.
        hf_added_to_norms: Hugging Face's checkpoints store norm weights less this; GGUF files never do.
    """

    name: str
    gguf_name: str | None
    from_hf: Callable[[Values], DecoderConfig]
    from_gguf: Callable[[GgufHeader], DecoderConfig] | None
    hf_prefixes: tuple[str, ...] = ("model.",)
    hf_ignored: str | None = None
    hf_names: Mapping[str, str] = field(default_factory=HF_NAMES.copy)
    hf_layer_names: Mapping[str, str] = field(default_factory=HF_LAYER_NAMES.copy)
    gguf_names: Mapping[str, str] = field(default_factory=GGUF_NAMES.copy)
    gguf_layer_names: Mapping[str, str] = field(default_factory=GGUF_LAYER_NAMES.copy)
    gguf_interleaves_heads: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=FUSED.copy)
    hf_added_to_norms: float = 0.0

    def read_hf(self, values: Values) -> DecoderConfig:
        """config.json -> config.

        Raises:
            CheckpointError: a value that we cannot honour.
        """
        config = self.from_hf(values)
        values.refuse_unread(SWITCHES)
        return config

    def read_gguf(self, header: GgufHeader) -> DecoderConfig:
        """Header of a GGUF file -> config.

        Raises:
            CheckpointError: a value that we cannot honour.
        """
        assert self.from_gguf is not None
        config = self.from_gguf(header)
        header.values.refuse_unread(GGUF_SWITCHES)
        return config

    def hf_slots(self, config: DecoderConfig) -> dict[str, Slot]:
        """Every tensor that a Hugging Face checkpoint must have (without its prefix), and where it goes."""
        slots = self._slots(config, self.hf_names, self.hf_layer_names, "layers")
        if not self.hf_added_to_norms:
            return slots
        return {
            name: replace(slot, added=self.hf_added_to_norms) if slot.tensor.endswith("norm") else slot
            for name, slot in slots.items()
        }

    def gguf_slots(self, config: DecoderConfig) -> dict[str, Slot]:
        """Every tensor that a GGUF file must have, and where it goes."""
        return self._slots(config, self.gguf_names, self.gguf_layer_names, "blk", self.gguf_interleaves_heads)

    def _slots(
        self,
        config: DecoderConfig,
        names: Mapping[str, str],
        layer_names: Mapping[str, str],
        layer_prefix: str,
        interleaved: bool = False,
    ) -> dict[str, Slot]:
        shapes = config.weight_shapes()
        slots = {names[ours]: Slot(ours, 0, shapes[ours]) for ours in names if ours in shapes}
        heads = {"q": config.num_heads, "k": config.num_kv_heads} if interleaved else {}
        for layer in range(config.num_layers):
            for tensor, shape in config.layer_shapes(layer).items():
                for part, start, num_rows in self._parts(config, tensor, shape[0]):
                    name = f"{layer_prefix}.{layer}.{_name_of(part, layer_names)}"
                    num_heads = heads.get(part.removesuffix("_bias"), 0)
                    slots[name] = Slot(f"layers.{layer}.{tensor}", start, (num_rows, *shape[1:]), num_heads)
        return slots

    def _parts(self, config: DecoderConfig, tensor: str, num_rows: int) -> Iterator[tuple[str, int, int]]:
        """What a checkpoint stores of a layer's tensor: (part, its first row in ours, its rows)."""
        prefix, dot, name = tensor.rpartition(".")
        sizes = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
        start = 0
        parts = self.fused.get(name, (name,))
        for part in parts:
            size = sizes.get(part.removesuffix("_bias"), num_rows // len(parts))
            yield prefix + dot + part, start, size
            start += size


def _name_of(part: str, names: Mapping[str, str]) -> str:
    """A part's name in a checkpoint; `experts.<i>.<part>` has that of `expert.<part>`."""
    if not part.startswith("experts."):
        return names[part]
    _, expert, inner = part.split(".")
    return names[f"expert.{inner}"].format(expert=expert)


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
