"""Granite 3, dense: Llama's form with four multipliers: of embeddings, scores, residuals and logits."""

from __future__ import annotations

from forerun.models.config import DecoderConfig
from forerun.models.families.base import Family, GgufHeader
from forerun.models.families.gguf import gguf_config
from forerun.models.families.hf import hf_config
from forerun.models.families.values import Values

NAME = "granite"


def from_hf(values: Values) -> DecoderConfig:
    bias = values.flag("attention_bias", False)
    return hf_config(
        values,
        NAME,
        head_dim=values.optional_integer("head_dim"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=values.flag("mlp_bias", False),
        embedding_scale=values.number("embedding_multiplier", 1.0),
        attention_scale=values.number("attention_multiplier", 1.0),
        residual_scale=values.number("residual_multiplier", 1.0),
        logits_scale=values.number("logits_scaling", 1.0),
    )


def from_gguf(header: GgufHeader) -> DecoderConfig:
    values = header.values
    return gguf_config(
        header,
        NAME,
        embedding_scale=values.number("embedding_scale", 0.0) or 1.0,  # where there is none llama.cpp has 0 for it
        attention_scale=values.number("attention.scale", 0.0) or None,
        residual_scale=values.number("residual_scale", 0.0) or 1.0,
        logits_scale=values.number("logit_scale"),
    )


FAMILY = Family(name=NAME, gguf_name=NAME, from_hf=from_hf, from_gguf=from_gguf, gguf_interleaves_heads=True)
