"""Qwen2 and Qwen2.5: Llama's form with biases on q, k and v."""

from __future__ import annotations

from forerun.models.config import DecoderConfig
from forerun.models.families.base import Family, GgufHeader
from forerun.models.families.gguf import gguf_config
from forerun.models.families.hf import hf_config, hf_windows
from forerun.models.families.values import Values

NAME = "qwen2"


def from_hf(values: Values) -> DecoderConfig:
    return hf_config(
        values,
        NAME,
        head_dim=values.optional_integer("head_dim"),
        qkv_bias=True,
        sliding_windows=upper_windows(values),
    )


def upper_windows(values: Values) -> tuple[int | None, ...]:
    """Layers from max_window_layers on have a window, if it is switched on."""
    first = values.integer("max_window_layers", 28)
    return hf_windows(values, lambda layer: layer >= first, enabled=values.flag("use_sliding_window", False))


def from_gguf(header: GgufHeader) -> DecoderConfig:
    return gguf_config(header, NAME)


FAMILY = Family(name=NAME, gguf_name=NAME, from_hf=from_hf, from_gguf=from_gguf)
