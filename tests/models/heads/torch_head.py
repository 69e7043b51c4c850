"""The published definitions of EAGLE-1/2, EAGLE-3 and P-EAGLE heads in plain torch: to be fitted, and as a reference.

Written from the papers and the published trainers, not from our code, as `definition.py` is; this one is
differentiable, computes many rows at once, and its tensors are those of the checkpoint, by their names. There is no
cache: whoever asks for a row gives all rows that it sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class TorchHead:
    """A head's tensors, `layers.0` being `midlayer`, and its config.

    Attributes:
        target_embedding, target_head: [Vt, Ht], of the target.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    target_embedding: Tensor
    target_head: Tensor

    @property
    def is_eagle3(self) -> bool:
        return "layers.0.hidden_norm.weight" in self.tensors

    def double(self) -> TorchHead:
        """The same in float64, without gradients."""
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        return TorchHead(tensors, self.config, self.target_embedding.double(), self.target_head.double())

    def combine(self, states: Tensor) -> Tensor:
        """The target's states [..., S, Ht], one for each layer that the head looks at -> [..., H]."""
        if not self.is_eagle3:
            return states.squeeze(-2)
        if self.config.get("fc_norm"):
            each = enumerate(states.unbind(-2))
            states = torch.stack([self._norm(state, f"fc_norm.{i}") for i, state in each], dim=-2)
        joined = states.flatten(-2)
        if self.config.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm")
        return self._linear(joined, "fc")

    def run(self, token_ids: Tensor, states: Tensor, positions: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """What each row feeds back [B, R, H], and its logits [B, R, Vd].

        Args:
            token_ids: [B, R], of the token after the state.
            states: [B, R, H].
            positions: [R], of the states.
            sees: [R, R] bool, whether a row (first axis) attends to another.
        """
        embedded = self.tensors.get("embed_tokens.weight", self.target_embedding)[token_ids]
        if self.is_eagle3:
            normed = self._norm(states, "layers.0.hidden_norm")
            inputs = torch.cat((self._norm(embedded, "layers.0.input_layernorm"), normed), dim=-1)
            hidden = normed if self.config.get("norm_before_residual") else states
        else:
            inputs = hidden = self._linear(torch.cat((embedded, states), dim=-1), "fc")
        for layer in range(self.config["num_hidden_layers"]):
            if layer:
                inputs = self._norm(hidden, f"layers.{layer}.input_layernorm")
            hidden = self._layer(f"layers.{layer}.", inputs, hidden, positions, sees)
        if not self.is_eagle3:
            return hidden, hidden @ self.target_head.T
        normed = self._norm(hidden, "norm")
        logits = normed @ self.tensors.get("lm_head.weight", self.target_head).T
        return (normed if self.config.get("norm_output") else hidden), logits

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.tensors["d2t"][draft_ids] if "d2t" in self.tensors else draft_ids

    def _layer(self, name: str, inputs: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        query, key, value = (self._heads(inputs, f"{name}self_attn.{kind}", positions) for kind in "qkv")
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, enable_gqa=True)
        hidden = hidden + self._linear(attended.transpose(1, 2).flatten(2), f"{name}self_attn.o_proj")
        x = self._norm(hidden, f"{name}post_attention_layernorm")
        gated = F.silu(self._linear(x, f"{name}mlp.gate_proj")) * self._linear(x, f"{name}mlp.up_proj")
        return hidden + self._linear(gated, f"{name}mlp.down_proj")

    def _heads(self, inputs: Tensor, name: str, positions: Tensor) -> Tensor:
        """[B, R, W] -> [B, heads, R, D], queries and keys normed if the head has such norms, and rotated."""
        dim = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        heads = self._linear(inputs, f"{name}_proj").unflatten(-1, (-1, dim)).transpose(1, 2)
        if name.endswith("v"):
            return heads
        if f"{name}_norm.weight" in self.tensors:
            heads = self._norm(heads, f"{name}_norm")
        exponents = torch.arange(dim // 2, dtype=inputs.dtype) / (dim // 2)
        angles = positions[:, None] * self.config.get("rope_theta", 10_000.0) ** -exponents  # [R, D / 2]
        cos, sin = angles.cos(), angles.sin()
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]
