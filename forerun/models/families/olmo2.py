"""OLMo 2: norms after attention and MLP only, and one over all heads of queries and of keys."""

from __future__ import annotations

from forerun.models.config import DecoderConfig
from forerun.models.families.base import HF_LAYER_NAMES, HF_POST_NORM_NAMES, Family, GgufHeader
from forerun.models.families.gguf import gguf_config
from forerun.models.families.hf import hf_config
from forerun.models.families.values import Values

NAME = "olmo2"


def from_hf(values: Values) -> DecoderConfig:
    bias = values.flag("attention_bias", False)
    return hf_config(
        values,
        NAME,
        head_dim=values.optional_integer("head_dim"),
        eps=1e-5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="row",
        pre_norms=False,
        post_norms=True,
    )


def from_gguf(header: GgufHeader) -> DecoderConfig:
    return gguf_config(header, NAME, qk_norm="row", pre_norms=False, post_norms=True)


FAMILY = Family(
    name=NAME,
    gguf_name=NAME,
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_layer_names=HF_LAYER_NAMES | HF_POST_NORM_NAMES,
)
