"""Llama 1 to 3 and what shares their form (SmolLM, TinyLlama, Yi, many others); Mistral too in GGUF files."""

from __future__ import annotations

from forerun.models.config import DecoderConfig
from forerun.models.families.base import Family, GgufHeader
from forerun.models.families.gguf import gguf_config, gguf_windows
from forerun.models.families.hf import hf_config
from forerun.models.families.values import Values

NAME = "llama"


def from_hf(values: Values) -> DecoderConfig:
    bias = values.flag("attention_bias", False)
    return hf_config(
        values,
        NAME,
        head_dim=values.optional_integer("head_dim"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=values.flag("mlp_bias", False),
    )


def from_gguf(header: GgufHeader) -> DecoderConfig:
    return gguf_config(header, NAME, sliding_windows=gguf_windows(header.values))


FAMILY = Family(name=NAME, gguf_name=NAME, from_hf=from_hf, from_gguf=from_gguf, gguf_interleaves_heads=True)
