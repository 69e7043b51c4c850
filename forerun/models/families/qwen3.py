"""Qwen3, dense: no biases, a norm on each query and key head, head_dim of its own."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.models.config import DecoderConfig
from forerun.models.families.base import Family, Values, gguf_config, hf_config
from forerun.models.families.qwen2 import refuse_sliding_window

NAME = "qwen3"


def from_hf(values: Values) -> DecoderConfig:
    refuse_sliding_window(values)
    bias = values.flag("attention_bias", False)
    return hf_config(
        values,
        NAME,
        head_dim=values.integer("head_dim", 128),  # where the key is missing, 128 and not hidden_size / num_heads
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def from_gguf(general: Values, values: Values, shapes: Mapping[str, tuple[int, ...]]) -> DecoderConfig:
    return gguf_config(general, values, shapes, NAME, qk_norm=True)


FAMILY = Family(name=NAME, from_hf=from_hf, from_gguf=from_gguf)
