"""The decoder layers of a draft head.

They differ from a decoder's in what enters the first: the head itself says what its attention sees and what it adds to.
Query and key-value are separate products, so that a row's keys and values alone have the bits they have in a full pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention import AttentionInputs, Rope
from forerun.kernels.fused import Linear, Mlp, linear_add, rms_norm
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Attend
from forerun.models.families.base import GGUF_LAYER_NAMES, HF_LAYER_NAMES, Slot
from forerun.models.heads.config import Shapes
from forerun.models.heads.head import Write
from forerun.models.layers import Weight, linear_of, rope_tables, vector_of

# Parts of our fused tensors, equally long, in row order.
PARTS = {
    "query": ("q",),
    "kv": ("k", "v"),
    "gate_up": ("gate", "up"),
}
LINEARS = ("query", "kv", "output")


@dataclass(frozen=True, slots=True)
class Names:
    """How a form of checkpoint calls our tensors.

    Attributes:
        ends: those outside of layers; not listed: our name and `.weight`.
        layer: the parts of a layer.
        layer_prefix: before the layer's number.
        interleaved: q and k rows come as llama.cpp orders them, see `Slot`.
    """

    ends: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str
    interleaved: bool = False

    def slots(self, shapes: Shapes, config: DecoderConfig) -> dict[str, Slot]:
        """Every tensor that a checkpoint of this form must have to fill tensors of these names and shapes."""
        slots: dict[str, Slot] = {}
        heads = {"q": config.num_heads, "k": config.num_kv_heads} if self.interleaved else {}
        for tensor, shape in shapes.items():
            if not tensor.startswith("layers."):
                slots[self.ends.get(tensor, f"{tensor}.weight")] = Slot(tensor, 0, shape)
                continue
            _, layer, name = tensor.split(".")
            matrix = name.removesuffix("_bias")
            parts = PARTS.get(matrix, (matrix,))
            num_rows = shape[0] // len(parts)
            for place, part in enumerate(parts):
                theirs = self.layer[part + name.removeprefix(matrix)]
                slots[f"{self.layer_prefix}.{layer}.{theirs}"] = Slot(
                    tensor, place * num_rows, (num_rows, *shape[1:]), heads.get(part, 0)
                )
        return slots


HF = Names(
    {"embedding": "embed_tokens.weight", "head": "lm_head.weight", "fc_bias": "fc.bias", "mask_hidden": "mask_hidden"},
    HF_LAYER_NAMES | {"hidden_norm": "hidden_norm.weight"},
    "layers",
)
GGUF = Names(
    {
        "embedding": "token_embd.weight",
        "head": "output.weight",
        "norm": "output_norm.weight",
        "input_norm": "enc.output_norm.weight",
    },
    GGUF_LAYER_NAMES | {"hidden_norm": "attn_norm_2.weight"},
    "blk",
    interleaved=True,
)


def block_shapes(config: DecoderConfig, layer: int, width: int) -> dict[str, tuple[int, ...]]:
    """A layer's tensors, by our names. width: of what its attention is given."""
    shapes = config.layer_shapes(layer)
    bias = shapes.pop("qkv_bias", None)
    del shapes["qkv"]
    shapes |= {"query": (config.query_size, width), "kv": (2 * config.kv_size, width)}
    if bias:
        shapes |= {"query_bias": (config.query_size,), "kv_bias": (2 * config.kv_size,)}
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class Block:
    """One layer; shapes in `block_shapes`. attn_norm: of ordinary layers, which norm what enters their attention."""

    query: Linear
    kv: Linear
    output: Linear
    mlp_norm: Tensor
    mlp: Mlp
    attn_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Weight], layer: int) -> Block:
        prefix = f"layers.{layer}."
        linears = {name: linear_of(weights, prefix + name) for name in LINEARS}
        names = [name for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm") if prefix + name in weights]
        mlp = Mlp(linear_of(weights, f"{prefix}gate_up"), linear_of(weights, f"{prefix}down"))
        norms = {name: vector_of(weights, prefix + name) for name in names}
        return cls(**linears, mlp=mlp, **norms)  # type: ignore[arg-type]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.query, self.kv, self.output, *self.mlp.linears


class Blocks:
    """A head's layers, one after the other."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Weight], max_positions: int) -> None:
        self.config = config
        self.blocks = [Block.of(weights, layer) for layer in range(config.num_layers)]
        self.cos, self.sin = rope_tables(config.rope, config.head_dim, max_positions, self.blocks[0].mlp_norm)

    @property
    def linears(self) -> list[Linear]:
        return [linear for block in self.blocks for linear in block.linears]

    def forward(self, inputs: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> None:
        """All layers, in place on hidden.

        Args:
            inputs: [T, W], what the first layer's attention is given.
            hidden: [T, H], what the first layer adds to.
            positions, attend: as in `Head.forward`.
        """
        cos, sin = self.cos[positions], self.sin[positions]  # [T, D / 2]
        for layer in range(len(self.blocks)):
            self._run(layer, inputs, hidden, cos, sin, attend)

    def fill(self, inputs: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, write: Write) -> None:
        """The same as far as it leaves something in the cache: of the last layer, keys and values only."""
        cos, sin = self.cos[positions], self.sin[positions]
        last = len(self.blocks) - 1
        for layer in range(last):
            self._run(layer, inputs, hidden, cos, sin, attend)
        block, config = self.blocks[last], self.config
        kv = block.kv(self._inputs(last, inputs, hidden))
        rope = Rope(cos, sin, block.k_norm, block.k_norm, config.rms_norm_eps)
        write(last, AttentionInputs(kv, 0, config.num_kv_heads, rope))

    def _run(self, layer: int, inputs: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        block, config = self.blocks[layer], self.config
        inputs = self._inputs(layer, inputs, hidden)
        product = torch.cat((block.query(inputs), block.kv(inputs)), dim=1)
        rope = Rope(cos, sin, block.q_norm, block.k_norm, config.rms_norm_eps)
        attended = attend(layer, AttentionInputs(product, config.num_heads, config.num_kv_heads, rope))
        linear_add(attended.flatten(1), block.output, hidden)
        block.mlp.add(hidden, block.mlp_norm, config.rms_norm_eps, hidden)

    def _inputs(self, layer: int, inputs: Tensor, hidden: Tensor) -> Tensor:
        norm = self.blocks[layer].attn_norm
        return inputs if layer == 0 or norm is None else rms_norm(hidden, norm, self.config.rms_norm_eps)
