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

from forerun.errors import ConfigError
from forerun.kernels import linear, rms_norm
from forerun.models.config import DecoderConfig
from forerun.models.layers import LayerWeights, attention_inputs, mlp, rope_tables

Tap = tuple[int, bool]
"""(j, after the final norm): j names the residual stream that enters layer j; num_layers is what leaves the last."""


class Attend(Protocol):
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the rows' keys and values, and attend from each row to those it may see.

        Args:
            query: [T, nh, D], contiguous, rope applied, not scaled (the scale is 1 / sqrt(D)).
            key, value: [T, nkv, D]; rope is applied to key. Valid during the call only.
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
        weights: a tensor for every name and shape of `config.weight_shapes()`, all of one dtype.
        max_positions: positions 0..max_positions-1 can be computed; None: the config's.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], max_positions: int | None = None) -> None:
        self.config = config
        self.embedding = weights["embedding"]  # [V, H]
        self.norm = weights["norm"]
        self.head = self.embedding if config.tie_word_embeddings else weights["head"]  # [V, H]
        self.layers = [LayerWeights.of(weights, config, layer) for layer in range(config.num_layers)]
        self.max_positions = max_positions or config.max_position_embeddings
        self.cos, self.sin = rope_tables(config, self.max_positions, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

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
        cos, sin = self.cos[positions], self.sin[positions]  # [T, D / 2]
        hidden = self.embedding[token_ids]
        states: dict[Tap, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if (index, False) in taps:
                states[index, False] = hidden
            query, key, value = attention_inputs(hidden, layer, config, cos, sin)
            attended = attend(index, query, key, value).flatten(1)  # [T, nh * D]
            hidden = hidden + linear(attended, layer.output, layer.output_bias)
            hidden = hidden + mlp(hidden, layer, config)
        normed = rms_norm(hidden, self.norm, config.rms_norm_eps)
        last = {(config.num_layers, False): hidden, (config.num_layers, True): normed}
        states.update({tap: state for tap, state in last.items() if tap in taps})
        return DecoderOutput(normed, states)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H], after the final norm -> [R, V] float32."""
        return linear(hidden, self.head).float()

    def _check_taps(self, taps: Sequence[Tap]) -> None:
        last = self.config.num_layers
        for layer, after_norm in taps:
            if not 0 <= layer <= last or (after_norm and layer != last):
                raise ConfigError(
                    f"hidden state ({layer}, after_final_norm={after_norm}) does not exist: layers are 0 to {last}, "
                    f"and only {last} has a state after the final norm"
                )
