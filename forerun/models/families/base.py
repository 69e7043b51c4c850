"""What a family file is made of: typed reading of a checkpoint's metadata, and where each of its tensors goes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import CheckpointError
from forerun.models.config import DecoderConfig, RopeConfig

REQUIRED: Any = object()


class Values:
    """A checkpoint's metadata, read with its types checked. A missing or null key gives the default.

    Raises (every getter):
        CheckpointError: the key is missing and has no default, or its value is of another type.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
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
        value = self._typed(key, default, "a number", lambda v: isinstance(v, float) or _is_integer(v))
        try:
            return float(value)
        except OverflowError:
            raise self._error(key, value, "a number") from None

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value: bool = self._typed(key, default, "true or false", lambda v: isinstance(v, bool))
        return value

    def text(self, key: str, default: Any = REQUIRED) -> str:
        value: str = self._typed(key, default, "a string", lambda v: isinstance(v, str))
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = self._typed(key, {}, "an object", lambda v: isinstance(v, dict))
        return value

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

    def _typed(self, key: str, default: Any, what: str, check: Callable[[Any], bool]) -> Any:
        value = self.get(key, default)
        if value is not default and not check(value):
            raise self._error(key, value, what)
        return value

    def _error(self, key: str, value: Any, what: str) -> CheckpointError:
        return CheckpointError(f"{self.prefix}{key} must be {what}, got {reprlib.repr(value)}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a checkpoint's tensor goes.

    Attributes:
        tensor: our name, a key of `DecoderConfig.weight_shapes`.
        start: the first of our tensor's rows that it fills.
        shape: the shape it must have.
        interleaved_heads: rows come in this many heads, in each of which the two halves that rope rotates are
            interleaved (llama.cpp's order for Llama); 0 for halves that stand one after the other.
    """

    tensor: str
    start: int
    shape: tuple[int, ...]
    interleaved_heads: int = 0


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
}

# Parts of our fused tensors, in row order.
FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: how to read its config and where to find its tensors, in Hugging Face and in GGUF files.

    Attributes:
        name: `model_type` of config.json and `general.architecture` of a GGUF file.
        from_hf: config.json -> config.
        from_gguf: (metadata, metadata under the architecture's prefix, shapes of the tensors) -> config.
        gguf_interleaves_heads: llama.cpp's conversion reorders the rows of q and k.
    """

    name: str
    from_hf: Callable[[Values], DecoderConfig]
    from_gguf: Callable[[Values, Values, Mapping[str, tuple[int, ...]]], DecoderConfig]
    hf_names: Mapping[str, str] = field(default_factory=HF_NAMES.copy)
    hf_layer_names: Mapping[str, str] = field(default_factory=HF_LAYER_NAMES.copy)
    gguf_names: Mapping[str, str] = field(default_factory=GGUF_NAMES.copy)
    gguf_layer_names: Mapping[str, str] = field(default_factory=GGUF_LAYER_NAMES.copy)
    gguf_interleaves_heads: bool = False

    def hf_slots(self, config: DecoderConfig) -> dict[str, Slot]:
        """Every tensor that a Hugging Face checkpoint must have (without a leading `model.`), and where it goes."""
        return _slots(config, self.hf_names, self.hf_layer_names, "layers")

    def gguf_slots(self, config: DecoderConfig) -> dict[str, Slot]:
        """Every tensor that a GGUF file must have, and where it goes."""
        return _slots(config, self.gguf_names, self.gguf_layer_names, "blk", self.gguf_interleaves_heads)


def _slots(
    config: DecoderConfig,
    names: Mapping[str, str],
    layer_names: Mapping[str, str],
    layer_prefix: str,
    interleaved: bool = False,
) -> dict[str, Slot]:
    shapes = config.weight_shapes()
    slots = {names[ours]: Slot(ours, 0, shapes[ours]) for ours in names if ours in shapes}
    parts = _layer_parts(config, interleaved)
    for layer in range(config.num_layers):
        for name, part in parts.items():
            ours = f"layers.{layer}.{part.tensor}"
            slots[f"{layer_prefix}.{layer}.{layer_names[name]}"] = Slot(
                ours, part.start, part.shape, part.interleaved_heads
            )
    return slots


def _layer_parts(config: DecoderConfig, interleaved: bool) -> dict[str, Slot]:
    """What a checkpoint stores of one layer: our tensors taken apart."""
    rows = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
    rows |= {"gate": config.intermediate_size, "up": config.intermediate_size}
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if interleaved else {}
    parts = {}
    for tensor, shape in config.layer_shapes().items():
        start = 0
        for part in FUSED.get(tensor, (tensor,)):
            kind = part.removesuffix("_bias")
            num_rows = rows.get(kind, shape[0]) if tensor in FUSED else shape[0]
            parts[part] = Slot(tensor, start, (num_rows, *shape[1:]), heads.get(kind, 0))
            start += num_rows
    return parts


def hf_config(values: Values, family: str, *, head_dim: int | None, **differences: Any) -> DecoderConfig:
    """The keys of config.json that all families share; the keywords are what only this family says."""
    values.refuse("hidden_act", ("silu", "swish"))
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
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=hf_rope(values),
        tie_word_embeddings=values.flag("tie_word_embeddings", False),
        eos_token_ids=values.token_ids("eos_token_id"),
        bos_token_id=next(iter(values.token_ids("bos_token_id")), None),
        **differences,
    )


def hf_rope(values: Values) -> RopeConfig:
    """Rope in the spelling of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    rope = Values(values.mapping("rope_scaling") or values.mapping("rope_parameters"))
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise CheckpointError("rope_parameters per layer type are not supported")
    theta = rope.number("rope_theta", values.number("rope_theta", 10_000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if (partial := rope.number("partial_rotary_factor", values.number("partial_rotary_factor", 1.0))) != 1.0:
        raise CheckpointError(f"partial_rotary_factor={partial} is not supported")
    max_positions = values.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", max_positions)
    original = values.integer("original_max_position_embeddings", original)
    if kind == "linear":
        return RopeConfig(theta=theta, type=kind, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            type=kind,
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
            factor=factor,
            original_max_positions=original,
            beta_fast=rope.number("beta_fast", 0.0) or 32.0,
            beta_slow=rope.number("beta_slow", 0.0) or 1.0,
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    return RopeConfig(theta=theta, type=kind)


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
    general: Values, values: Values, shapes: Mapping[str, tuple[int, ...]], family: str, **differences: Any
) -> DecoderConfig:
    """The keys of GGUF metadata that all families share. Biases and the head are there if their tensors are."""
    for key in ("expert_count", "attention.clamp_kqv", "logit_scale", "attention.scale"):
        values.refuse(key, (0, 0.0))
    num_heads = _uniform(values, "attention.head_count")
    hidden_size = values.integer("embedding_length")
    head_dim = values.integer("attention.key_length", hidden_size // max(num_heads, 1))
    values.refuse("attention.value_length", (head_dim,))
    values.refuse("rope.dimension_count", (head_dim,))
    max_positions = values.integer("context_length")
    if 0 < (window := values.integer("attention.sliding_window", 0)) < max_positions:
        raise CheckpointError(f"{values.prefix}attention.sliding_window={window} is not supported yet")
    return DecoderConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=values.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=_uniform(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_uniform(values, "feed_forward_length"),
        vocab_size=shapes.get("token_embd.weight", (0,))[0],
        max_position_embeddings=max_positions,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=gguf_rope(values, max_positions),
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        eos_token_ids=_gguf_end_tokens(general),
        bos_token_id=next(iter(general.token_ids("tokenizer.ggml.bos_token_id")), None),
        **differences,
    )


def _gguf_end_tokens(general: Values) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for key in keys for token in general.token_ids(key)))


def _uniform(values: Values, key: str, default: Any = REQUIRED) -> int:
    """An integer that may be written once a layer."""
    value = values.get(key)
    if not isinstance(value, list):
        return values.integer(key, default)
    if len(set(value)) != 1:
        raise CheckpointError(f"{values.prefix}{key} differs between layers: not supported")
    return Values({key: value[0]}).integer(key)


def gguf_rope(values: Values, max_positions: int) -> RopeConfig:
    """llama3's scaling is not in the metadata: it is a tensor, which the loader adds as `frequency_factors`."""
    for key in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        values.refuse(key, (0.0, 1.0))
    theta = values.number("rope.freq_base", 10_000.0)
    linear = values.number("rope.scale_linear", 1.0)
    kind = values.text("rope.scaling.type", "linear" if linear != 1.0 else "none")
    if kind == "none":
        return RopeConfig(theta=theta)
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
        )
    return RopeConfig(theta=theta, type=kind, factor=factor)
