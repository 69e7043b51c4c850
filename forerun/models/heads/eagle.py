"""EAGLE-1 and EAGLE-2 heads: a decoder layer that continues the target's last hidden state.

Both have the same weights; EAGLE-2 only drafts otherwise (trees, `spec/tree.py`). What a row computes:

    x = fc([E(next token); h])          h: the target's state after its final norm
    y = x + Attention(x)                no norm before it in the first layer
    g = y + MLP(RMS(y))
    logits = the target's head (g)      no norm: g stands for a state after the target's final norm
    fed back: g

Source: Li et al. 2024, arXiv 2401.15077 and 2406.16858.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.fused import Embedding, Linear, embed
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Attend
from forerun.models.families.values import Values
from forerun.models.heads.blocks import Blocks, block_shapes
from forerun.models.heads.config import HeadConfig, Shapes, check_vocabulary, hf_layers
from forerun.models.heads.head import HeadOutput, Write
from forerun.models.layers import Weight, linear_of

METHOD = "eagle"


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig(HeadConfig):
    """fc_bias: whether the projection adds one."""

    fc_bias: bool

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the head, by our names."""
        width = self.layers.hidden_size
        shapes = self.end_shapes() | {"fc": (width, 2 * width)}
        if self.fc_bias:
            shapes["fc_bias"] = (width,)
        for layer in range(self.layers.num_layers):
            shapes |= block_shapes(self.layers, layer, width)
        del shapes["layers.0.attn_norm"]
        return shapes

    def __str__(self) -> str:
        return f"an EAGLE head (fc bias: {self.fc_bias}; no norm before the first layer's attention, none at the end)"


def from_hf(values: Values, tensors: Shapes, target: DecoderConfig) -> EagleConfig:
    """config.json and the names of the tensors -> config.

    Raises:
        CheckpointError: it does not fit the target, or says what we do not compute.
    """
    layers = hf_layers(values, tensors, METHOD)
    check_vocabulary(layers, target)
    if layers.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"hidden_size={layers.hidden_size}, but the target's is {target.hidden_size}: a head of another target"
        )
    bias = values.get("bias")
    if bias is not None and values.flag("bias") != ("fc.bias" in tensors):
        raise CheckpointError(f"bias={bias}, but tensor 'fc.bias' is {'missing' if bias else 'there'}")
    return EagleConfig(
        method=METHOD,
        layers=layers,
        draft_vocab_size=layers.vocab_size,
        target_hidden_size=target.hidden_size,
        taps=((target.num_layers, True),),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        fc_bias="fc.bias" in tensors,
    )


class EagleHead:
    """See `Head` and the top of this module.

    Args:
        weights: a tensor, or a packed weight, for every name of `config.weight_shapes()`.
        embedding, head: the head's own or the target's.
    """

    draft_to_target: Tensor | None = None
    mask_state: Tensor | None = None

    def __init__(
        self,
        config: EagleConfig,
        weights: Mapping[str, Weight],
        embedding: Embedding,
        head: Linear,
        max_positions: int,
    ) -> None:
        self.config = config
        self.max_positions = config.max_positions(max_positions)
        self.weight_bytes = 0
        self.notes: tuple[str, ...] = ()
        self.embedding = embedding
        self.head = head
        self.fc = linear_of(weights, "fc")
        self.blocks = Blocks(config.layers, weights, self.max_positions)

    @property
    def linears(self) -> list[Linear]:
        return [self.fc, *self.blocks.linears, self.head]

    def combine(self, taps: Sequence[Tensor]) -> Tensor:
        (state,) = taps
        return state

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> HeadOutput:
        state = self._enter(token_ids, hidden)
        self.blocks.forward(state, state, positions, attend)
        return HeadOutput(state, state)

    @torch.inference_mode()
    def fill(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, write: Write) -> None:
        state = self._enter(token_ids, hidden)
        self.blocks.fill(state, state, positions, attend, write)

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        return self.head(normed).float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def _enter(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat((embed(token_ids, self.embedding), hidden), dim=1))
