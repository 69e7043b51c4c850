"""A draft head as numbers, and the parts of its metadata that all networks share. No torch here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forerun.errors import CheckpointError
from forerun.models.config import DecoderConfig
from forerun.models.families.hf import hf_config
from forerun.models.families.values import Values

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]

LAYER_TYPES = ("llama", "qwen2", "qwen3")  # model_type of the layers: all of them one block here
ANY_LENGTH_ROPES = ("default", "linear", "llama3")  # their angles do not depend on the longest context


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """A draft head's sizes, the same for all networks.

    Attributes:
        method: the `method` of a speculative configuration that drafts with it.
        layers: its own layers. `vocab_size` is the target's.
        draft_vocab_size: columns of its logits.
        target_hidden_size: width of the target's states.
        taps: the target's states that it is given, in the order of its input; see `decoder.Tap`.
        own_embedding, own_head: the checkpoint has these matrices.
        tied: the output head is the head's embedding.
        num_speculative_tokens: what the checkpoint was trained for; None where it does not say.
        verifier: the target that the checkpoint names.
        mask_token_id: the token of rows of which nothing is known (P-EAGLE).
    """

    method: str
    layers: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[tuple[int, bool], ...]
    own_embedding: bool
    own_head: bool
    tied: bool = False
    num_speculative_tokens: int | None = None
    verifier: str | None = None
    mask_token_id: int | None = None

    def end_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tables that a head may have or share."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.own_embedding:
            shapes["embedding"] = (self.layers.vocab_size, self.layers.hidden_size)
        if self.own_head:
            shapes["head"] = (self.draft_vocab_size, self.layers.hidden_size)
        return shapes

    def max_positions(self, target_positions: int) -> int:
        """How far it can follow a target of so many positions. Heads are often trained, and labelled, much shorter."""
        if self.layers.rope.type in ANY_LENGTH_ROPES:
            return target_positions
        return min(target_positions, self.layers.max_position_embeddings)


def nested(values: Values, key: str) -> Values:
    """The object under `key`; errors name its keys with it."""
    prefix = f"{values.prefix}{key}."
    return Values({prefix + name: value for name, value in values.mapping(key).items()}, prefix)


def hf_layers(values: Values, tensors: Collection[str], method: str) -> DecoderConfig:
    """The layers of a head in Hugging Face's spelling. Biases and head norms are there if their tensors are."""
    kind = values.text("model_type", "llama")
    if kind not in LAYER_TYPES:
        raise CheckpointError(
            f"{values.prefix}model_type={kind!r} is not supported for a head; supported: {', '.join(LAYER_TYPES)}"
        )
    layers = hf_config(
        values,
        method,
        head_dim=values.optional_integer("head_dim"),
        qkv_bias=_has(tensors, "self_attn.q_proj.bias"),
        output_bias=_has(tensors, "self_attn.o_proj.bias"),
        mlp_bias=_has(tensors, "mlp.down_proj.bias"),
        qk_norm="head" if _has(tensors, "self_attn.q_norm.weight") else None,
    )
    _check_biases(values, layers)
    return dataclasses.replace(layers, sliding_windows=_sliding_windows(values, layers.num_layers))


def _has(tensors: Collection[str], name: str) -> bool:
    return f"layers.0.{name}" in tensors


def _check_biases(values: Values, layers: DecoderConfig) -> None:
    """A key may be silent about biases that are there, but must not promise others."""
    promised = {"attention_bias": layers.qkv_bias, "qkv_bias": layers.qkv_bias, "mlp_bias": layers.mlp_bias}
    for key, there in promised.items():
        if values.flag(key, False) and not there:
            raise CheckpointError(f"{values.prefix}{key}=true, but the first layer has no such tensors")


def _sliding_windows(values: Values, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` says which layers slide; without it Qwen's older pair of keys."""
    window = values.optional_integer("sliding_window")
    kinds = values.get("layer_types")
    if kinds is None and values.flag("use_sliding_window", False):
        first = values.integer("max_window_layers", num_layers)
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    if kinds is None:
        if window is not None and values.get("use_sliding_window") is None:
            logger.warning("%ssliding_window=%d has no effect without layer_types", values.prefix, window)
        return ()
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"{values.prefix}layer_types must be a list of {num_layers} of {', '.join(known)}, got {kinds!r}"
        )
    if "sliding_attention" not in kinds:
        return ()
    if window is None or window < 1:
        raise CheckpointError(f"{values.prefix}sliding_window must be at least 1 where layers slide, got {window}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def check_vocabulary(layers: DecoderConfig, target: DecoderConfig) -> None:
    if layers.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"vocab_size={layers.vocab_size}, but the target's is {target.vocab_size}: a head of another target"
        )


def speculators_length(values: Values) -> int | None:
    """K of a speculators checkpoint: `speculative_tokens` of the proposal method that it names as its default."""
    config = nested(values, "speculators_config")
    methods = config.get("proposal_methods", [])
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise CheckpointError(f"{config.prefix}proposal_methods must be a list of objects, got {methods!r}")
    default = config.text("default_proposal_method", "")
    chosen = [method for method in methods if method.get("proposal_type") == default] or methods
    tokens = Values(chosen[0]).optional_integer("speculative_tokens") if chosen else None
    if tokens is not None and tokens < 1:
        raise CheckpointError(f"{config.prefix}proposal_methods: speculative_tokens must be at least 1, got {tokens}")
    return tokens
