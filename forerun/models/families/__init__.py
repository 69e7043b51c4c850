"""The families that the decoder can run, by `model_type` (config.json) or `general.architecture` (GGUF)."""

from collections.abc import Mapping

from forerun.errors import CheckpointError
from forerun.models.families import (
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from forerun.models.families.base import Family

_ALL = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma3.FAMILY_WITH_IMAGES,
    phi3.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
GGUF_FAMILIES: dict[str, Family] = {family.gguf_name: family for family in _ALL if family.gguf_name is not None}


def family_of(name: str, key: str, families: Mapping[str, Family] = FAMILIES) -> Family:
    """The family of that name; `key` says where the name stood.

    Raises:
        CheckpointError: it is not among the families.
    """
    if name not in families:
        raise CheckpointError(f"{key}={name!r} is not supported; supported: {', '.join(families)}")
    return families[name]
