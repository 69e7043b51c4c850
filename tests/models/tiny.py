"""Tiny random models of each family: as Hugging Face classes (the oracle), as directories and as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in which no norm is all ones and no bias all zeros: those would hide errors."""
    sizes = SIZES | ({"head_dim": 24} if family == "qwen3" else {}) | overrides
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def hf_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[T, V] float32."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def save_hf(model: PreTrainedModel, path: Path, **kwargs: Any) -> Path:
    model.save_pretrained(path, **kwargs)
    return path


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """As llama.cpp's conversion does it: matrices in `kind`, vectors in F32, Llama's q and k rows interleaved."""
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_token_list([f"token-{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, array in gguf_tensors(model).items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        kind = name.split(".")[-2]
        if config.model_type == "llama" and kind in heads:
            halves = array.reshape(heads[kind], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if (ours := gguf_name(name)) and not (name.startswith("lm_head") and config.tie_word_embeddings):
            tensors[ours] = np.ascontiguousarray(array)
    return tensors


def gguf_name(name: str) -> str:
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, suffix = name.rsplit(".", 1)
    if stem in ends:
        return f"{ends[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER[part]}.{suffix}"


def quantised(model: PreTrainedModel, kind: GGMLQuantizationType) -> PreTrainedModel:
    """The same model, its matrices rounded as a GGUF file of that kind rounds them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                raw = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))
    return model


class CausalCache:
    """An `Attend` whose rows are computed one by one: it sees all rows stored so far at positions up to its own."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def at(self, positions: list[int]) -> CausalCache:
        """The positions of the rows of the next forward pass."""
        self.new = positions
        self.positions += positions
        return self

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys = self.keys.setdefault(layer, [])
        values = self.values.setdefault(layer, [])
        keys += key.clone().unbind(0)
        values += value.clone().unbind(0)
        return torch.stack([self._row(q, p, keys, values) for q, p in zip(query, self.new, strict=True)])

    def _row(self, query: Tensor, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        seen = sorted((p, i) for i, p in enumerate(self.positions) if p <= position)
        key = torch.stack([keys[i] for _, i in seen])  # [n, nkv, D]
        value = torch.stack([values[i] for _, i in seen])
        grouped = query.view(key.shape[1], -1, query.shape[-1])  # [nkv, nh / nkv, D]
        scores = torch.einsum("hgd,nhd->hgn", grouped, key) / query.shape[-1] ** 0.5
        return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), value).flatten(0, 1)


def attend_to_self(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """An `Attend` without a past: each row sees itself."""
    grouped = query.view(len(key), key.shape[1], -1, key.shape[2])
    gate = torch.tanh((grouped * key.unsqueeze(2)).sum(-1, keepdim=True))
    return (gate * value.unsqueeze(2)).flatten(1, 2)
