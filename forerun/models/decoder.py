"""One config-driven decoder for all families: tokens and positions in, hidden states and logits out.

It knows no request, cache or schedule: attention over earlier tokens is the caller's `Attend`. A row's bits do not
depend on the other rows of a call, as long as `attend` keeps to that too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from forerun.attention import AttentionInputs, AttentionSpec, KVShape
from forerun.errors import ConfigError
from forerun.kernels.fused import Embedding, Experts, Linear, embed, linear_add, rms_norm
from forerun.kernels.packed import PackedLinear, PackedWeight
from forerun.kernels.reference import ROW_TILE, soft_cap
from forerun.models.config import DecoderConfig
from forerun.models.layers import LayerWeights, Weight, attention_inputs, linear_of, rope_tables, vector_of

Tap = tuple[int, bool]
"""(j, after the final norm): j names the residual stream that enters layer j; num_layers is what leaves the last."""


def attention_spec(config: DecoderConfig, block_size: int = 16, *, invariant: bool = False) -> AttentionSpec:
    """What the model's attention backend is built from."""
    return AttentionSpec(
        KVShape(config.num_layers, config.num_kv_heads, config.head_dim, block_size),
        config.num_heads,
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        softcap=config.attention_softcap,
        windows=config.sliding_windows,
        invariant=invariant,
    )


class Attend(Protocol):
    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Store the rows' keys and values, and attend from each row to those it may see.

        Args:
            inputs: of T rows, valid during the call only. Queries are not scaled: see `attention_spec`.
        Returns:
            [T, nh, D]
        """
        ...


@dataclass(slots=True)
class DecoderOutput:
    """hidden: [T, H] after the final norm. taps: the states asked for, [T, H] each."""

    hidden: Tensor
    taps: dict[Tap, Tensor] = field(default_factory=dict)


class Decoder:
    """A model ready to run.

    Args:
        weights: for every name of `config.weight_shapes()` a tensor of that shape, all of one dtype; or, for matrices,
            packed weights (see `layers.Weight`), which compute in float32.
        max_positions: positions 0..max_positions-1 can be computed; None: the config's.
        invariant: on a GPU too a row's bits must not depend on the other rows of a call; needs Triton there.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        max_positions: int | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        self.config = config
        self.invariant = invariant
        embedding = weights["embedding"]
        assert not isinstance(embedding, PackedLinear)
        self.embedding: Embedding = embedding  # [V, H]
        self.norm = vector_of(weights, "norm")
        head = "embedding" if config.tie_word_embeddings else "head"
        self.head: Linear = linear_of(weights, head, invariant)  # [V, H]
        self.layers = [
            LayerWeights.of(weights, config, layer, invariant=invariant) for layer in range(config.num_layers)
        ]
        self.max_positions = max_positions or config.max_position_embeddings
        self.rope_tables = [
            rope_tables(rope, config.head_dim, self.max_positions, self.norm) for rope in config.ropes
        ]  # cos and sin, [max_positions, R / 2] each
        # In the dtype of the weights, as Gemma's embeddings are scaled in Hugging Face's class.
        self.embedding_scale = self.norm.new_tensor(config.embedding_scale)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights, and so of all that is computed."""
        return self.norm.device

    @property
    def linears(self) -> list[Linear]:
        return [self.head, *(linear for layer in self.layers for linear in layer.linears)]

    @property
    def is_packed(self) -> bool:
        """Whether all products run in the CPU extension, on weights as they are stored. Routers, too small to count,
        stay as they are."""
        routers = {id(layer.mlp.router) for layer in self.layers if isinstance(layer.mlp, Experts)}
        return all(isinstance(linear, PackedLinear) or id(linear) in routers for linear in self.linears)

    @property
    def row_multiple(self) -> int:
        """Steps of so many rows cost no more than fewer: what plain products are padded to."""
        return 1 if self.is_packed or self.device.type != "cpu" else ROW_TILE

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values lose nothing worth its memory in: bfloat16 beside packed weights' own rounding."""
        return torch.bfloat16 if self.is_packed else self.dtype

    @property
    def weight_bytes(self) -> int:
        """Memory of the matrices; a tied head counts once."""
        embedding = 0 if self.config.tie_word_embeddings else _num_bytes(self.embedding)
        return embedding + sum(
            linear.num_bytes if isinstance(linear, PackedLinear) else _num_bytes(linear.weight)
            for linear in self.linears
        )

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[Tap] = ()) -> DecoderOutput:
        """Run all layers over T tokens.

        Args:
            token_ids, positions: [T] integers. Positions may repeat and come in any order, as in a tree.
            attend: called once a layer, in order.
            taps: states to return; see `Tap`.
        Raises:
            ConfigError: a tap that the model does not have.
        """
        self._check_taps(taps)
        config = self.config
        ropes = [(cos[positions], sin[positions]) for cos, sin in self.rope_tables]  # [T, R / 2] each
        hidden = embed(token_ids, self.embedding)
        if config.embedding_scale != 1:
            hidden *= self.embedding_scale
        states: dict[Tap, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if (index, False) in taps:
                states[index, False] = hidden.clone()  # layers add to it in place
            inputs = attention_inputs(hidden, layer, config, *ropes[config.rope_index(index)])
            attended = attend(index, inputs).flatten(1)  # [T, nh * D]
            linear_add(attended, layer.output, hidden, layer.attn_merge)
            layer.mlp.add(hidden, layer.mlp_norm, config.rms_norm_eps, hidden, layer.mlp_merge)
        normed = rms_norm(hidden, self.norm, config.rms_norm_eps)
        last = {(config.num_layers, False): hidden, (config.num_layers, True): normed}
        states.update({tap: state for tap, state in last.items() if tap in taps})
        return DecoderOutput(normed, states)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """hidden [R, H], after the final norm -> [R, V]. dtype: None: as they are computed, in that of the weights."""
        logits = self.head(hidden)
        if self.config.logits_scale != 1:
            logits /= self.config.logits_scale
        if self.config.logits_softcap is not None:
            logits = soft_cap(logits, self.config.logits_softcap)
        return logits if dtype is None else logits.to(dtype)

    def _check_taps(self, taps: Sequence[Tap]) -> None:
        last = self.config.num_layers
        for layer, after_norm in taps:
            if not 0 <= layer <= last or (after_norm and layer != last):
                raise ConfigError(
                    f"hidden state ({layer}, after_final_norm={after_norm}) does not exist: layers are 0 to {last}, "
                    f"and only {last} has a state after the final norm"
                )


def _num_bytes(weight: Embedding) -> int:
    return weight.num_bytes if isinstance(weight, PackedWeight) else weight.nbytes
