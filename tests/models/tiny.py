"""Tiny random models of each family: as Hugging Face classes (the oracle), as directories and as GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forerun.attention import AttentionBackend, AttentionInputs, AttentionSpec, QueryTile, StepLayout
from forerun.models.decoder import Decoder, attention_spec

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SLIDING, FULL = "sliding_attention", "full_attention"
# What a family has beyond these sizes; windows and caps are small enough to matter in a short text.
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "sliding_window": None,
    },
    "gemma2": {
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "layer_types": [SLIDING, SLIDING, FULL],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
        },
    },
    "phi3": {
        "sliding_window": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
}
FAMILIES = tuple(FAMILY_SIZES)
TIED_ONLY = ("gemma2",)  # their GGUF files have no head of their own


def hf_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in which no norm is all ones and no bias all zeros: those would hide errors."""
    sizes = SIZES | FAMILY_SIZES[family] | overrides
    if sizes.get("layer_types"):
        sizes["layer_types"] = (sizes["layer_types"] * 99)[: sizes["num_hidden_layers"]]
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
    """As llama.cpp's conversion does it: matrices in `kind`, vectors and routers in F32, Llama's q and k rows
    interleaved, Gemma's norms with their one added, experts stacked."""
    config = model.config
    arch = GGUF_ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "rope_theta" in config.rope_parameters:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_token_list([f"token-{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    own = {f"{arch}.{key}": value for key, value in gguf_metadata(config).items()}
    for key, value in (own | dict(metadata or {})).items():
        kind_of = type(value).__name__
        add = {"str": "add_string", "int": "add_uint32", "float": "add_float32", "list": "add_array"}[kind_of]
        getattr(writer, add)(key, value)
    for name, array in gguf_tensors(model).items():
        if array.ndim == 1 or "ffn_gate_inp" in name:
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


GGUF_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
INTERLEAVED = ("llama", "mistral", "granite")


def gguf_metadata(config: Any) -> dict[str, Any]:
    """What a family's files say beyond what all say."""
    family = config.model_type
    if family == "mistral":
        return {"attention.sliding_window": config.sliding_window} if config.sliding_window else {}
    if family == "gemma2":
        return {
            "attention.sliding_window": config.sliding_window,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    if family == "gemma3_text":
        ropes = config.rope_parameters
        return {
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": config.layer_types.index(FULL) + 1,
            "rope.freq_base": ropes[FULL]["rope_theta"],
            "rope.freq_base_swa": ropes[SLIDING]["rope_theta"],
            "rope.scaling.type": "linear",
            "rope.scaling.factor": ropes[FULL]["factor"],
        }
    if family == "phi3":
        head_dim = config.hidden_size // config.num_attention_heads
        return {
            "attention.sliding_window": config.sliding_window or 0,
            "rope.dimension_count": int(head_dim * config.rope_parameters["partial_rotary_factor"]),
            "rope.scaling.original_context_length": config.original_max_position_embeddings,
        }
    if family == "granite":
        return {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        }
    if family == "qwen3_moe":
        return {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return {}


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        kind = name.split(".")[-2]
        if config.model_type in INTERLEAVED and kind in heads:
            halves = array.reshape(heads[kind], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if config.model_type.startswith("gemma") and kind.endswith("norm"):
            array = array + 1
        if name.startswith("lm_head") and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            stem = f"blk.{name.split('.')[2]}."
            tensors |= {f"{stem}ffn_gate_exps.weight": gate, f"{stem}ffn_up_exps.weight": up}
        else:
            tensors[gguf_name(name, config.model_type)] = array
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def gguf_name(name: str, family: str) -> str:
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if name.endswith("experts.down_proj"):
        return f"blk.{name.split('.')[2]}.ffn_down_exps.weight"
    stem, suffix = name.rsplit(".", 1)
    if stem in ends:
        return f"{ends[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    if part == "post_attention_layernorm" and family in ("gemma2", "gemma3_text", "olmo2"):
        return f"blk.{layer}.post_attention_norm.{suffix}"
    return f"blk.{layer}.{GGUF_LAYER[part]}.{suffix}"


GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def quantised(model: PreTrainedModel, kind: GGMLQuantizationType) -> PreTrainedModel:
    """The same model, its matrices rounded as a GGUF file of that kind rounds them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith("mlp.gate.weight"):
                raw = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, kind)))
    return model


class PagedCache:
    """One sequence in a backend's cache, its blocks in no order; what nobody wrote is NaN where the backend allows."""

    def __init__(
        self,
        decoder: Decoder,
        make: Callable[[AttentionSpec, Tensor, torch.dtype], AttentionBackend],
        num_blocks: int = 8,
        dtype: torch.dtype = torch.float32,
        fill: int = 0,
    ) -> None:
        spec = attention_spec(decoder.config)
        self.decoder = decoder
        self.block_size = spec.shape.block_size
        self.table = torch.randperm(num_blocks).tolist()
        pool = torch.full((num_blocks * spec.shape.block_bytes(dtype.itemsize),), fill, dtype=torch.uint8)
        self.attention = make(spec, pool, dtype)

    def logits(self, tokens: list[int], start: int = 0) -> Tensor:
        """Of a step over tokens at positions start.. ."""
        positions = range(start, start + len(tokens))
        size, tile = self.block_size, self.attention.row_tile
        slots = [self.table[p // size] * size + p % size for p in positions]
        tiles = [
            QueryTile(range(first, min(first + tile, len(tokens))), start + first, self.table)
            for first in range(0, len(tokens), tile)
        ]
        self.attention.begin(StepLayout(torch.tensor(slots), tiles))
        output = self.decoder.forward(torch.tensor(tokens), torch.tensor(positions), self.attention.attend)
        return self.decoder.logits(output.hidden)


def chunks(tokens: list[int], sizes: Iterator[int]) -> Iterator[tuple[list[int], int]]:
    """(some tokens, their first position), as many at once as the sizes say."""
    start = 0
    while start < len(tokens):
        size = next(sizes)
        yield tokens[start : start + size], start
        start += size


class CausalCache:
    """An `Attend` whose rows are computed one by one: each sees the rows stored so far at positions up to its own, as
    far as its layer's window reaches."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.positions: list[int] = []
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def at(self, positions: list[int]) -> CausalCache:
        """The positions of the rows of the next forward pass."""
        self.new = positions
        self.positions += positions
        return self

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        query, key, value = inputs.heads()
        keys = self.keys.setdefault(layer, [])
        values = self.values.setdefault(layer, [])
        keys += key.clone().unbind(0)
        values += value.clone().unbind(0)
        window = self.spec.window(layer) or 10**9
        return torch.stack([self._row(q, p, keys, values, window) for q, p in zip(query, self.new, strict=True)])

    def _row(self, query: Tensor, position: int, keys: list[Tensor], values: list[Tensor], window: int) -> Tensor:
        seen = sorted((p, i) for i, p in enumerate(self.positions) if position - window < p <= position)
        key = torch.stack([keys[i] for _, i in seen])  # [n, nkv, D]
        value = torch.stack([values[i] for _, i in seen])
        grouped = query.view(key.shape[1], -1, query.shape[-1])  # [nkv, nh / nkv, D]
        scores = torch.einsum("hgd,nhd->hgn", grouped, key) * self.spec.scale
        if self.spec.softcap is not None:
            scores = (scores / self.spec.softcap).tanh() * self.spec.softcap
        return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), value).flatten(0, 1)


def attend_to_self(layer: int, inputs: AttentionInputs) -> Tensor:
    """An `Attend` without a past: each row sees itself."""
    query, key, value = inputs.heads()
    grouped = query.view(len(key), key.shape[1], -1, key.shape[2])
    gate = torch.tanh((grouped * key.unsqueeze(2)).sum(-1, keepdim=True))
    return (gate * value.unsqueeze(2)).flatten(1, 2)
