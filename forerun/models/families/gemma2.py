"""Gemma 2: norms before and after attention and MLP, capped scores and logits, every other layer with a window."""

from __future__ import annotations

from typing import Any

from forerun.errors import CheckpointError
from forerun.models.config import DecoderConfig
from forerun.models.families.base import HF_LAYER_NAMES, HF_POST_NORM_NAMES, Family, GgufHeader
from forerun.models.families.gguf import gguf_config, gguf_windows
from forerun.models.families.hf import hf_config, hf_windows
from forerun.models.families.values import Values

NAME = "gemma2"
LAYERS_OF_27B = 46


def from_hf(values: Values) -> DecoderConfig:
    return hf_config(
        values,
        NAME,
        head_dim=values.integer("head_dim", 256),
        logits_softcap=values.optional_number("final_logit_softcapping"),
        attention_softcap=values.optional_number("attn_logit_softcapping"),
        sliding_windows=hf_windows(values, lambda layer: layer % 2 == 0),
        **hf_common(values),
    )


def hf_common(values: Values) -> dict[str, Any]:
    """What config.json of Gemma 2 and 3 says in the same way."""
    scalar = values.number("query_pre_attn_scalar", 256)
    if not scalar > 0:
        raise CheckpointError(f"query_pre_attn_scalar must be a positive number, got {scalar}")
    bias = values.flag("attention_bias", False)
    return {
        "activation_key": "hidden_activation",
        "activation": "gelu_tanh",
        "tied": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "post_norms": True,
        "embedding_scale": abs(values.number("hidden_size")) ** 0.5,
        "attention_scale": scalar**-0.5,
    }


def from_gguf(header: GgufHeader) -> DecoderConfig:
    values = header.values
    return gguf_config(
        header,
        NAME,
        logits_softcap=values.number("final_logit_softcapping", 30.0),
        attention_softcap=values.number("attn_logit_softcapping", 50.0),
        sliding_windows=gguf_windows(values, default_period=2),
        **gguf_common(values, LAYERS_OF_27B),
    )


def gguf_common(values: Values, layers_of_27b: int) -> dict[str, Any]:
    """As llama.cpp has it: files do not say how scores are scaled; the 27B model, known by its layers, has its own."""
    hidden_size = max(values.integer("embedding_length"), 1)
    scale = None
    if values.integer("block_count") == layers_of_27b:
        scale = (max(values.integer("attention.head_count"), 1) / hidden_size) ** 0.5
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": hidden_size**0.5,
        "attention_scale": scale,
    }


FAMILY = Family(
    name=NAME,
    gguf_name=NAME,
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_layer_names=HF_LAYER_NAMES | HF_POST_NORM_NAMES,
    hf_added_to_norms=1.0,
)
