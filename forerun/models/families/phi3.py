"""Phi-3, Phi-3.5 and Phi-4: Llama's form, stored fused; some with LongRoPE, some rotate a part of a head only."""

from __future__ import annotations

import dataclasses

from forerun.models.config import DecoderConfig
from forerun.models.families.base import GGUF_LAYER_NAMES, HF_LAYER_NAMES, Family, GgufHeader
from forerun.models.families.gguf import gguf_config, gguf_head_dim, gguf_rope, gguf_windows
from forerun.models.families.hf import hf_config, hf_rope, hf_windows
from forerun.models.families.values import Values

NAME = "phi3"
LONGROPE_NAMES = {"su": "longrope", "yarn": "longrope"}  # in early checkpoints


def from_hf(values: Values) -> DecoderConfig:
    default_dim = values.integer("hidden_size") // max(values.integer("num_attention_heads"), 1)
    head_dim = values.integer("head_dim", default_dim)
    return hf_config(
        values,
        NAME,
        head_dim=head_dim,
        eps=1e-5,
        rope=hf_rope(values, head_dim, LONGROPE_NAMES),
        sliding_windows=hf_windows(values),
    )


def from_gguf(header: GgufHeader) -> DecoderConfig:
    values = header.values
    dim = values.integer("rope.dimension_count", gguf_head_dim(values))
    rope = dataclasses.replace(gguf_rope(header), dim=dim)
    return gguf_config(header, NAME, rope=rope, sliding_windows=gguf_windows(values))


FAMILY = Family(
    name=NAME,
    gguf_name=NAME,
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_layer_names=HF_LAYER_NAMES | {"qkv": "self_attn.qkv_proj.weight", "gate_up": "mlp.gate_up_proj.weight"},
    gguf_layer_names=GGUF_LAYER_NAMES | {"qkv": "attn_qkv.weight", "gate_up": "ffn_up.weight"},
    fused={},
)
