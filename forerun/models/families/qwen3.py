"""Qwen3, dense: no biases, a norm on each query and key head, head_dim of its own."""

from __future__ import annotations

from forerun.models.config import DecoderConfig
from forerun.models.families.base import Family, GgufHeader
from forerun.models.families.gguf import gguf_config
from forerun.models.families.hf import hf_config
from forerun.models.families.qwen2 import upper_windows
from forerun.models.families.values import Values

NAME = "qwen3"


def from_hf(values: Values) -> DecoderConfig:
    bias = values.flag("attention_bias", False)
    return hf_config(
        values,
        NAME,
        head_dim=values.integer("head_dim", 128),  # where the key is missing, 128 and not hidden_size / num_heads
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        sliding_windows=upper_windows(values),
    )


def from_gguf(header: GgufHeader) -> DecoderConfig:
    return gguf_config(header, NAME, qk_norm="head")


FAMILY = Family(name=NAME, gguf_name=NAME, from_hf=from_hf, from_gguf=from_gguf)
