"""The families that the decoder can run, by `model_type` (config.json) or `general.architecture` (GGUF)."""

from forerun.errors import CheckpointError
from forerun.models.families import llama, qwen2, qwen3
from forerun.models.families.base import Family

FAMILIES: dict[str, Family] = {module.NAME: module.FAMILY for module in (llama, qwen2, qwen3)}


def family_of(name: str, key: str) -> Family:
    """The family of that name; `key` says where the name stood.

    Raises:
        CheckpointError: it is not among FAMILIES.
    """
    if name not in FAMILIES:
        raise CheckpointError(f"{key}={name!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]
