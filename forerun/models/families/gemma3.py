"""Gemma 3, the text model: Gemma 2 without caps, a norm on each query and key head, two ropes.

`gemma3` is a checkpoint with an image encoder, which is left aside; `gemma3_text` one without.
"""

from __future__ import annotations

import dataclasses

from forerun.models.config import DecoderConfig, RopeConfig
from forerun.models.families.base import HF_LAYER_NAMES, HF_POST_NORM_NAMES, SWITCHES, Family, GgufHeader
from forerun.models.families.gemma2 import gguf_common, hf_common
from forerun.models.families.gguf import gguf_config, gguf_rope, gguf_windows
from forerun.models.families.hf import hf_config, hf_rope_of, hf_windows
from forerun.models.families.values import Values

NAME = "gemma3_text"
LAYERS_OF_27B = 62
PERIOD = 6  # the last of so many layers has no window
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0

# What config.json leaves out where it does not differ from these, in checkpoints with images.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def from_hf(values: Values) -> DecoderConfig:
    period = values.integer("sliding_window_pattern", PERIOD)
    full, sliding = hf_ropes(values)
    return hf_config(
        values,
        NAME,
        head_dim=values.integer("head_dim", 256),
        rope=full,
        sliding_rope=sliding,
        qk_norm="head",
        logits_softcap=values.optional_number("final_logit_softcapping"),
        sliding_windows=hf_windows(values, lambda layer: (layer + 1) % max(period, 1) != 0),
        **hf_common(values),
    )


def hf_ropes(values: Values) -> tuple[RopeConfig, RopeConfig]:
    """Of layers without and with a window. transformers 4 names their thetas apart, and scales the former only."""
    nested = Values(values.mapping("rope_parameters"))
    full = Values(values.mapping("rope_scaling") or nested.mapping("full_attention"))
    sliding = Values(nested.mapping("sliding_attention"))
    return (
        hf_rope_of(full, values, values.number("rope_theta", GLOBAL_THETA)),
        hf_rope_of(sliding, values, values.number("rope_local_base_freq", LOCAL_THETA)),
    )


def from_hf_with_images(values: Values) -> DecoderConfig:
    text = Values(DEFAULTS | values.mapping("text_config") | {"quantization_config": values.get("quantization_config")})
    config = from_hf(text)
    text.refuse_unread(SWITCHES)
    return dataclasses.replace(
        config,
        tie_word_embeddings=values.flag("tie_word_embeddings", config.tie_word_embeddings),
        eos_token_ids=values.token_ids("eos_token_id") or config.eos_token_ids,
    )


def from_gguf(header: GgufHeader) -> DecoderConfig:
    values = header.values
    rope = gguf_rope(header, GLOBAL_THETA)
    return gguf_config(
        header,
        NAME,
        rope=rope,
        sliding_rope=RopeConfig(theta=values.number("rope.freq_base_swa", LOCAL_THETA)),
        qk_norm="head",
        logits_softcap=values.number("final_logit_softcapping", 0.0) or None,
        sliding_windows=gguf_windows(values, default_period=PERIOD),
        **gguf_common(values, LAYERS_OF_27B),
    )


FAMILY = Family(
    name=NAME,
    gguf_name="gemma3",
    from_hf=from_hf,
    from_gguf=from_gguf,
    hf_layer_names=HF_LAYER_NAMES | HF_POST_NORM_NAMES,
    hf_added_to_norms=1.0,
)
FAMILY_WITH_IMAGES = dataclasses.replace(
    FAMILY,
    name="gemma3",
    gguf_name=None,
    from_hf=from_hf_with_images,
    from_gguf=None,
    hf_prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
    hf_ignored=r"^(vision_tower|multi_modal_projector)\.",
)
