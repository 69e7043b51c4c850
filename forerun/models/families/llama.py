"""Llama 1 to 3 and what shares their form (SmolLM, TinyLlama, Yi, many others)."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.models.config import DecoderConfig
from forerun.models.families.base import Family, Values, gguf_config, hf_config

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


def from_gguf(general: Values, values: Values, shapes: Mapping[str, tuple[int, ...]]) -> DecoderConfig:
    return gguf_config(general, values, shapes, NAME)


FAMILY = Family(name=NAME, from_hf=from_hf, from_gguf=from_gguf, gguf_interleaves_heads=True)
