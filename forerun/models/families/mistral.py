"""Mistral 7B, Nemo, Small and their kin: Llama's form, in some with a window in all layers.

GGUF files of them say that they are of the Llama family.
"""

from __future__ import annotations

from forerun.models.config import DecoderConfig
from forerun.models.families.base import Family
from forerun.models.families.hf import hf_config, hf_windows
from forerun.models.families.values import Values

NAME = "mistral"


def from_hf(values: Values) -> DecoderConfig:
    return hf_config(values, NAME, head_dim=values.optional_integer("head_dim"), sliding_windows=hf_windows(values))


FAMILY = Family(name=NAME, gguf_name=None, from_hf=from_hf, from_gguf=None)
