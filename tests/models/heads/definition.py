"""The published definitions of EAGLE-1/2, EAGLE-3 and P-EAGLE heads in plain numpy, float64, without a cache.

Written from the papers and from what the published trainers compute, not from our code. All rows are computed anew each
time; a row says itself which rows it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Row:
    """token: the id that follows the state's position. state: [H]. sees: places of rows, its own included."""

    token: int
    state: Array
    position: int
    sees: Sequence[int]


@dataclass
class Definition:
    """A head's tensors, by the names of its checkpoint (`layers.0` for `midlayer`), and its config."""

    tensors: Mapping[str, Array]
    config: Mapping[str, Any]
    target_embedding: Array
    target_head: Array

    @property
    def is_eagle3(self) -> bool:
        return "layers.0.hidden_norm.weight" in self.tensors

    def combine(self, states: Sequence[Array]) -> Array:
        """The target's states of one position -> [H]."""
        if not self.is_eagle3:
            (state,) = states
            return state
        if self.config.get("fc_norm"):
            states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
        joined = np.concatenate(states)
        if self.config.get("norm_before_fc"):
            joined = self.norm(joined, "input_norm")
        return self.linear(joined, "fc")

    def run(self, rows: Sequence[Row]) -> tuple[list[Array], list[Array]]:
        """What each row feeds back [H], and its logits [Vd]."""
        entered = [self._enter(row) for row in rows]
        inputs = [pair[0] for pair in entered]
        hidden = [pair[1] for pair in entered]
        for layer in range(self.config["num_hidden_layers"]):
            if layer:
                inputs = [self.norm(state, f"layers.{layer}.input_layernorm") for state in hidden]
            hidden = self._layer(f"layers.{layer}.", rows, inputs, hidden)
        if not self.is_eagle3:
            return hidden, [self.target_head @ state for state in hidden]
        normed = [self.norm(state, "norm") for state in hidden]
        head = self.tensors.get("lm_head.weight", self.target_head)
        return (normed if self.config.get("norm_output") else hidden), [head @ state for state in normed]

    def _enter(self, row: Row) -> tuple[Array, Array]:
        embedded = self.tensors.get("embed_tokens.weight", self.target_embedding)[row.token]
        if not self.is_eagle3:
            x = self.linear(np.concatenate((embedded, row.state)), "fc")
            return x, x
        state = self.norm(row.state, "layers.0.hidden_norm")
        joined = np.concatenate((self.norm(embedded, "layers.0.input_layernorm"), state))
        return joined, state if self.config.get("norm_before_residual") else row.state

    def _layer(self, name: str, rows: Sequence[Row], inputs: list[Array], hidden: list[Array]) -> list[Array]:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim = self.config.get("head_dim") or self.config["hidden_size"] // heads
        query, key, value = (
            [self.linear(x, f"{name}self_attn.{kind}_proj").reshape(-1, dim) for x in inputs] for kind in "qkv"
        )
        for kind, vectors in (("q", query), ("k", key)):
            if f"{name}self_attn.{kind}_norm.weight" in self.tensors:
                vectors[:] = [self.norm(vector, f"{name}self_attn.{kind}_norm") for vector in vectors]
            vectors[:] = [self.rotate(vector, row.position) for vector, row in zip(vectors, rows, strict=True)]
        out = []
        for place, row in enumerate(rows):
            attended = []
            for head in range(heads):
                group = head * kv_heads // heads
                scores = np.array([query[place][head] @ key[i][group] for i in row.sees]) / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                attended.append(sum(w * value[i][group] for w, i in zip(weights, row.sees, strict=True)))
            y = hidden[place] + self.linear(np.concatenate(attended), f"{name}self_attn.o_proj")
            x = self.norm(y, f"{name}post_attention_layernorm")
            gate = self.linear(x, f"{name}mlp.gate_proj")
            middle = gate / (1 + np.exp(-gate)) * self.linear(x, f"{name}mlp.up_proj")
            out.append(y + self.linear(middle, f"{name}mlp.down_proj"))
        return out

    def linear(self, x: Array, name: str) -> Array:
        return self.tensors[f"{name}.weight"] @ x + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, x: Array, name: str) -> Array:
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def rotate(self, heads: Array, position: int) -> Array:
        half = heads.shape[1] // 2
        angles = position * self.config.get("rope_theta", 10_000.0) ** (-np.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)
