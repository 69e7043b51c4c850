"""EAGLE-3 heads, and P-EAGLE's, which draft all tokens in one pass. What a row computes:

    a = [states of some target layers], each [Ht], before any norm
    a = RMS(a)                          if norm_before_fc: one norm over all of them
    a = [RMS_0(a_0); RMS_1(a_1) ...]    if fc_norm: one norm a state
    g = fc(a)                           for target states only: what is fed back takes its place as it is
    e = RMS(E(next token)), n = RMS(g)
    y = (n if norm_before_residual else g) + Attention([e; n])
    z = y + MLP(RMS(y)), then further layers as a decoder has them
    u = RMS(z), logits = head(u) over the draft vocabulary
    fed back: u if norm_output else z

Source: Li et al. 2025, arXiv 2503.01840; the switches are those of the published trainers (SpecForge, speculators).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.fused import Embedding, Linear, embed, rms_norm
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Attend
from forerun.models.families.base import GgufHeader
from forerun.models.families.gguf import gguf_config
from forerun.models.families.values import Values
from forerun.models.heads.blocks import Blocks, block_shapes
from forerun.models.heads.config import (
    HeadConfig,
    Shapes,
    check_vocabulary,
    hf_layers,
    nested,
    speculators_length,
)
from forerun.models.heads.head import HeadOutput, Write
from forerun.models.layers import Weight, linear_of, vector_of

logger = logging.getLogger(__name__)

METHOD = "eagle3"
SPECULATORS = ("eagle3", "peagle")  # `speculators_model_type`
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
QK_NORM_KEYS = ("qk_norm", "use_qk_norm")  # the tensors say it


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config(HeadConfig):
    """norm_*, fc_norm: see the top of the module. has_fc: false where the head takes the target's last state as it is.
    logit_scale: factor of the logits."""

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    has_fc: bool = True
    logit_scale: float = 1.0

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the head, by our names."""
        width = self.layers.hidden_size
        states = len(self.taps) * self.target_hidden_size
        shapes = self.end_shapes()
        if self.has_fc:
            shapes["fc"] = (width, states)
        if self.norm_before_fc:
            shapes["input_norm"] = (states,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{state}": (self.target_hidden_size,) for state in range(len(self.taps))}
        if self.mask_token_id is not None:
            shapes["mask_hidden"] = (1, 1, states)
        shapes |= block_shapes(self.layers, 0, 2 * width)
        shapes["layers.0.hidden_norm"] = (width,)
        for layer in range(1, self.layers.num_layers):
            shapes |= block_shapes(self.layers, layer, width)
        shapes["norm"] = (width,)
        return shapes

    def __str__(self) -> str:
        switches = ", ".join(f"{name}={getattr(self, name)}".lower() for name in SWITCHES)
        return f"{'a P-EAGLE' if self.mask_token_id is not None else 'an EAGLE-3'} head with {switches}"


def from_hf(
    values: Values, tensors: Shapes, target: DecoderConfig, aux_layer_ids: Sequence[int] | None = None
) -> Eagle3Config:
    """config.json, flat or in speculators' form, and the shapes of the tensors -> config.

    Args:
        aux_layer_ids: states of the target to take, as layers that they enter, whatever the checkpoint says.
    Raises:
        CheckpointError: it does not fit the target, or says what we do not compute.
    """
    kind = values.text("speculators_model_type", "")
    layers = hf_layers(nested(values, "transformer_layer_config") if kind else values, tensors, METHOD)
    check_vocabulary(layers, target)
    options = nested(values, "eagle_config")
    _check_switches(values, options)
    num_draft = values.integer("draft_vocab_size", layers.vocab_size)
    if not 1 <= num_draft <= layers.vocab_size:
        raise CheckpointError(f"draft_vocab_size={num_draft} must be in 1..{layers.vocab_size}, the vocab_size")
    has_fc = options.flag("use_aux_hidden_state", values.flag("use_aux_hidden_state", True))
    ids = _aux_layers(values, options, target, aux_layer_ids, plus_one=not kind)
    config = Eagle3Config(
        method=METHOD,
        layers=layers,
        draft_vocab_size=num_draft,
        target_hidden_size=_target_width(values.optional_integer("target_hidden_size"), target),
        taps=tuple((layer, False) for layer in ids) if has_fc else ((target.num_layers, True),),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        tied=layers.tie_word_embeddings and "lm_head.weight" not in tensors,
        num_speculative_tokens=speculators_length(values),
        verifier=nested(nested(values, "speculators_config"), "verifier").text("name_or_path", None),
        mask_token_id=_mask_token(values, tensors, kind, layers.vocab_size),
        norm_before_residual=_switch(values, options, SWITCHES[0], default=_default_residual(values, kind)),
        norm_before_fc=_switch(values, options, SWITCHES[1]),
        fc_norm=_switch(values, options, SWITCHES[2]),
        norm_output=_switch(values, options, SWITCHES[3]),
        has_fc=has_fc,
        logit_scale=values.number("logit_scale", 1.0),
    )
    _check_fc(config, tensors.get("fc.weight"))
    return config


def from_gguf(header: GgufHeader, target: DecoderConfig, aux_layer_ids: Sequence[int] | None = None) -> Eagle3Config:
    """A GGUF file as llama.cpp makes them -> config.

    Args, Raises: see `from_hf`.
    """
    values, tensors = header.values, header.shapes
    vocabulary = tensors.get("token_embd.weight", (target.vocab_size, 0))[0]
    vocabulary = values.integer("vocab_size", vocabulary)
    width = values.integer("embedding_length")
    shapes = {**tensors, "token_embd.weight": (vocabulary, width)}
    layers = gguf_config(dataclasses.replace(header, shapes=shapes), METHOD)
    check_vocabulary(layers, target)
    given = values.get("target_layers", []) if aux_layer_ids is None else aux_layer_ids
    ids = _checked_layers(given, "eagle3.target_layers", target)
    if ids[0] == 1 and aux_layer_ids is None:
        logger.warning("eagle3.target_layers %s are taken as layers that states enter; some trainers count 1 less", ids)
    config = Eagle3Config(
        method=METHOD,
        layers=layers,
        draft_vocab_size=tensors.get("d2t", (layers.vocab_size,))[0],
        target_hidden_size=_target_width(values.optional_integer("target_hidden_size"), target),
        taps=tuple((layer, False) for layer in ids),
        own_embedding="token_embd.weight" in tensors,
        own_head="output.weight" in tensors,
        norm_before_residual=values.flag("norm_before_residual", False),
        norm_before_fc=values.flag("norm_before_fc", False),
        fc_norm=False,
        norm_output=False,
    )
    _check_fc(config, tensors.get("fc.weight"))
    return config


def _switch(values: Values, options: Values, name: str, default: bool = False) -> bool:
    return values.flag(name, options.flag(name, default))


def _default_residual(values: Values, kind: str) -> bool:
    """Readers of old speculators files do not agree on it; vLLM is what such heads were served with."""
    default = kind == "eagle3"
    if default and values.get(SWITCHES[0]) is None:
        logger.warning("%s is missing: taken as true, as vLLM does", SWITCHES[0])
    return default


def _check_switches(*objects: Values) -> None:
    """A norm that we do not know of would be left out in silence."""
    for values in objects:
        for key, value in values.values.items():
            name = key.removeprefix(values.prefix)
            if "norm" in name and value is True and name not in SWITCHES + QK_NORM_KEYS:
                raise CheckpointError(f"{key}=true is a norm that is not supported; supported: {', '.join(SWITCHES)}")


def _target_width(given: int | None, target: DecoderConfig) -> int:
    if given not in (None, target.hidden_size):
        raise CheckpointError(
            f"target_hidden_size={given}, but the target's width is {target.hidden_size}: a head of another target"
        )
    return target.hidden_size


def _aux_layers(
    values: Values, options: Values, target: DecoderConfig, override: Sequence[int] | None, plus_one: bool
) -> list[int]:
    """The layers whose incoming states the head is given.

    In flat checkpoints two meanings of the ids are about: the layer that a state enters, or the one that it leaves,
    which is one less. Trainers of the second kind start at 1, those of the first at 2: SGLang's rule, taken over.
    """
    if override is not None:
        return _checked_layers(override, "aux_layer_ids", target)
    key = "eagle_aux_hidden_state_layer_ids"
    for given, name in (
        (values.get(key), key),
        (options.get(key), f"eagle_config.{key}"),
        (options.get("layer_ids"), "eagle_config.layer_ids"),
    ):
        if given is not None:
            ids = _checked_layers(given, name, target)
            return _checked_layers([i + 1 for i in ids], f"{name} + 1", target) if plus_one and ids[0] == 1 else ids
    num_layers = target.num_layers
    ids = [2, num_layers // 2, num_layers - 3]
    if values.integer("num_aux_hidden_states", 3) != 3 or not 2 < ids[1] < ids[2]:
        raise CheckpointError(
            f"{key} is missing, and the usual layers 2, N/2 and N-3 are not three ascending ones for this head and a "
            f"target of {num_layers} layers: give the layers"
        )
    return ids


def _checked_layers(given: object, name: str, target: DecoderConfig) -> list[int]:
    last = target.num_layers
    if not isinstance(given, Sequence) or not given or not all(type(layer) is int for layer in given):
        raise CheckpointError(f"{name} must be a list of layers, got {given!r}")
    ids = list(given)
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > last:
        raise CheckpointError(f"{name} must be ascending layers of the target within 0..{last}, got {ids}")
    return ids


def _mask_token(values: Values, tensors: Shapes, kind: str, vocab_size: int) -> int | None:
    if kind != "peagle" and "mask_hidden" not in tensors:
        return None
    token = values.optional_integer("mask_token_id")
    token = values.optional_integer("ptd_token_id") if token is None else token
    if token is None:
        raise CheckpointError("mask_token_id is missing, which a head that drafts in parallel needs")
    if not 0 <= token < vocab_size:
        raise CheckpointError(f"mask_token_id={token} must be in 0..{vocab_size - 1}")
    return token


def _check_fc(config: Eagle3Config, shape: tuple[int, ...] | None) -> None:
    width, states = config.layers.hidden_size, config.target_hidden_size
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError("norm_before_fc and fc_norm are both true: no trainer makes such heads")
    if not config.has_fc:
        if width != states:
            raise CheckpointError(f"hidden_size={width}, but the target's is {states}: a head of another target")
        return
    count = len(config.taps)
    if shape is not None and shape != (width, count * states):
        raise CheckpointError(
            f"tensor 'fc.weight': expected shape {[width, count * states]} for {count} states of the target, {states} "
            f"wide each, found {list(shape)}: a head of another target, or of other layers"
        )


class Eagle3Head:
    """See `Head` and the top of this module.

    Args:
        weights: a tensor, or a packed weight, for every name of `config.weight_shapes()`.
        embedding, head: the head's own or the target's.
        draft_to_target: see `Head`.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: Mapping[str, Weight],
        embedding: Embedding,
        head: Linear,
        max_positions: int,
        draft_to_target: Tensor | None = None,
    ) -> None:
        self.config = config
        self.max_positions = config.max_positions(max_positions)
        self.weight_bytes = 0
        self.notes: tuple[str, ...] = ()
        self.draft_to_target = draft_to_target
        self.embedding = embedding
        self.head = head
        self.eps = config.layers.rms_norm_eps
        self.fc = linear_of(weights, "fc") if config.has_fc else None
        self.input_norm = vector_of(weights, "input_norm") if config.norm_before_fc else None
        self.fc_norms = [vector_of(weights, f"fc_norm.{i}") for i in range(len(config.taps)) if config.fc_norm]
        self.embedding_norm = vector_of(weights, "layers.0.attn_norm")
        self.hidden_norm = vector_of(weights, "layers.0.hidden_norm")
        self.norm = vector_of(weights, "norm")
        self.blocks = Blocks(config.layers, weights, self.max_positions)
        self.mask_state: Tensor | None = None
        if config.mask_token_id is not None:
            states = vector_of(weights, "mask_hidden").view(1, -1).chunk(len(config.taps), dim=1)
            self.mask_state = self.combine(states)[0]

    @property
    def linears(self) -> list[Linear]:
        return [*([] if self.fc is None else [self.fc]), *self.blocks.linears, self.head]

    @torch.inference_mode()
    def combine(self, taps: Sequence[Tensor]) -> Tensor:
        assert len(taps) == len(self.config.taps)
        states = torch.cat(list(taps), dim=1)
        if self.input_norm is not None:
            states = rms_norm(states, self.input_norm, self.eps)
        elif self.fc_norms:
            parts = zip(states.chunk(len(taps), dim=1), self.fc_norms, strict=True)
            states = torch.cat([rms_norm(part, norm, self.eps) for part, norm in parts], dim=1)
        return states if self.fc is None else self.fc(states)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> HeadOutput:
        inputs, state = self._enter(token_ids, hidden)
        self.blocks.forward(inputs, state, positions, attend)
        normed = rms_norm(state, self.norm, self.eps)
        return HeadOutput(normed if self.config.norm_output else state, normed)

    @torch.inference_mode()
    def fill(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, write: Write) -> None:
        inputs, state = self._enter(token_ids, hidden)
        self.blocks.fill(inputs, state, positions, attend, write)

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        logits = self.head(normed).float()
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.draft_to_target is None else self.draft_to_target[draft_ids]

    def _enter(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention is given [T, 2H], and what it adds to [T, H], a tensor of its own."""
        embedded = rms_norm(embed(token_ids, self.embedding), self.embedding_norm, self.eps)
        normed = rms_norm(hidden, self.hidden_norm, self.eps)
        inputs = torch.cat((embedded, normed), dim=1)
        return inputs, normed if self.config.norm_before_residual else hidden.clone()
