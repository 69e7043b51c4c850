"""Qwen2 and Qwen2.5: Llama's form with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.errors import CheckpointError
from forerun.models.config import DecoderConfig
from forerun.models.families.base import Family, Values, gguf_config, hf_config

NAME = "qwen2"


def from_hf(values: Values) -> DecoderConfig:
    refuse_sliding_window(values)
    return hf_config(values, NAME, head_dim=values.optional_integer("head_dim"), qkv_bias=True)


def refuse_sliding_window(values: Values) -> None:
    if values.flag("use_sliding_window", False):
        raise CheckpointError("use_sliding_window=true is not supported yet")


def from_gguf(general: Values, values: Values, shapes: Mapping[str, tuple[int, ...]]) -> DecoderConfig:
    return gguf_config(general, values, shapes, NAME)


FAMILY = Family(name=NAME, from_hf=from_hf, from_gguf=from_gguf)
