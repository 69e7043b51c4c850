"""Tiny random heads in the forms in which they are published, and a cache to run them with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from forerun.attention import AttentionInputs
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder

from .definition import Definition

Tensors = dict[str, Tensor]

VOCAB, DRAFT_VOCAB, HIDDEN, TARGET_LAYERS = 96, 40, 64, 8
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32,
}


def random(generator: torch.Generator, *shape: int) -> Tensor:
    """Vectors near 1 (norms; a bias is as good), matrices that keep the size of what they multiply."""
    if len(shape) == 1:
        return 1 + 0.3 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def with_extras(built: tuple[dict[str, Any], Tensors]) -> tuple[dict[str, Any], Tensors]:
    """The same head with a norm on each query and key head, and biases wherever a layer may have them."""
    config, tensors = built
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name.replace("weight", "bias")] = random(generator, len(tensors[name]))
        stem, kind = name.removesuffix("_proj.weight")[:-1], name.removesuffix("_proj.weight")[-1]
        if stem.endswith("self_attn.") and kind in "qk":
            dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            tensors[f"{stem}{kind}_norm.weight"] = random(generator, dim)
    return config, tensors


def layer_tensors(generator: torch.Generator, config: Mapping[str, Any], layer: int, width: int) -> Tensors:
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"layers.{layer}.{name}.weight": random(generator, *shape) for name, shape in shapes.items()}


def eagle(seed: int = 0, *, bias: bool = True, **overrides: Any) -> tuple[dict[str, Any], Tensors]:
    """An EAGLE-1/2 head: (config, tensors)."""
    config = CONFIG | {"bias": bias} | overrides
    generator = torch.Generator().manual_seed(seed)
    hidden = config["hidden_size"]
    tensors = {"fc.weight": random(generator, hidden, 2 * hidden)}
    if bias:
        tensors["fc.bias"] = random(generator, hidden)
    for layer in range(config["num_hidden_layers"]):
        tensors |= layer_tensors(generator, config, layer, hidden)
    del tensors["layers.0.input_layernorm.weight"]
    return config, tensors


def eagle3(
    seed: int = 0, *, num_states: int = 3, target_hidden: int = HIDDEN, **overrides: Any
) -> tuple[dict[str, Any], Tensors]:
    """An EAGLE-3 head in the flat form, `midlayer` being `layers.0` here: (config, tensors)."""
    config = CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB} | overrides
    generator = torch.Generator().manual_seed(seed)
    hidden, draft_vocab = config["hidden_size"], config["draft_vocab_size"] or config["vocab_size"]
    states = num_states * target_hidden
    tensors = {"fc.weight": random(generator, hidden, states), "norm.weight": random(generator, hidden)}
    tensors["lm_head.weight"] = random(generator, draft_vocab, hidden)
    tensors["embed_tokens.weight"] = random(generator, config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        tensors |= layer_tensors(generator, config, layer, hidden if layer else 2 * hidden)
    tensors["layers.0.hidden_norm.weight"] = random(generator, hidden)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = random(generator, states)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": random(generator, target_hidden) for i in range(num_states)}
    if draft_vocab != config["vocab_size"]:
        ids = torch.randperm(config["vocab_size"], generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return config, tensors


def as_midlayer(tensors: Tensors) -> Tensors:
    """The names that SafeAILab's and SpecForge's heads have."""
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def save(path: Path, config: Mapping[str, Any], tensors: Tensors, pickled: bool = False) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    return path


def definition(config: Mapping[str, Any], tensors: Tensors, target: Decoder) -> Definition:
    assert isinstance(target.embedding, Tensor)
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    return Definition(arrays, config, target.embedding.double().numpy(), target.head.weight.double().numpy())


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "input_norm": "enc.output_norm",
    "fc": "fc",
    "layers.0.input_layernorm": "blk.0.attn_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2",
    "layers.0.self_attn.q_proj": "blk.0.attn_q",
    "layers.0.self_attn.k_proj": "blk.0.attn_k",
    "layers.0.self_attn.v_proj": "blk.0.attn_v",
    "layers.0.self_attn.o_proj": "blk.0.attn_output",
    "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "layers.0.mlp.up_proj": "blk.0.ffn_up",
    "layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def save_gguf(path: Path, config: Mapping[str, Any], tensors: Tensors, **metadata: Any) -> Path:
    """As llama.cpp's conversion writes an EAGLE-3 head: q and k rows interleaved, d2t as target ids, t2d left out."""
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "eagle3"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(1)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    values = {"target_layers": [2, 4, 5], "target_hidden_size": HIDDEN, "norm_before_residual": False} | metadata
    for key, value in values.items():
        add = {list: writer.add_array, int: writer.add_uint32, bool: writer.add_bool}[type(value)]
        add(f"eagle3.{key}", value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if name == "d2t":
            writer.add_tensor(name, array + np.arange(len(array)))
        elif name != "t2d":
            stem, suffix = name.rsplit(".", 1)
            if (kind := stem.rsplit(".", 1)[-1]) in heads:
                array = array.reshape(heads[kind], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(f"{GGUF_NAMES[stem]}.{suffix}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class SlotCache:
    """Keys and values by position, the newest row of a position being the one that is seen. Attends and writes."""

    def __init__(self, layers: DecoderConfig) -> None:
        self.windows = layers.sliding_windows or (None,) * layers.num_layers
        self.rows: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(layers.num_layers)]

    def at(self, positions: Tensor) -> SlotCache:
        """The positions of the rows of the next call, ascending."""
        self.positions = positions.tolist()
        return self

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        query, key, value = inputs.heads()
        self._store(layer, key, value)
        stored, window = self.rows[layer], self.windows[layer]
        out = torch.empty_like(query)
        for row, position in enumerate(self.positions):
            seen = [stored[p] for p in sorted(stored) if p <= position and (window is None or p > position - window)]
            keys, values = (torch.stack(pair).transpose(0, 1) for pair in zip(*seen, strict=True))  # [nkv, n, D]
            attended = F.scaled_dot_product_attention(
                query[row].unsqueeze(1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), enable_gqa=True
            )
            out[row] = attended[0, :, 0]
        return out

    def write(self, layer: int, inputs: AttentionInputs) -> None:
        self._store(layer, *inputs.heads()[1:])

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        for position, k, v in zip(self.positions, key, value, strict=True):
            self.rows[layer][position] = (k.clone(), v.clone())
