"""What a model's generation_config.json says about sampling, for requests that do not say it themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError, ConfigError, RequestError
from forerun.request import SamplingParams

FILE = "generation_config.json"
KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(choice: str, model: str) -> dict[str, Any]:
    """Values by field of `SamplingParams`; {} where there are none.

    Args:
        choice: of `--generation-config`: "auto": the model's own, "vllm": none, else a directory with such a file.
        model: path of the model.
    Raises:
        ConfigError: a directory without the file, or values that no request could have.
    """
    if choice == "vllm":
        return {}
    path = Path(model if choice == "auto" else choice) / FILE
    if not path.is_file():
        if choice == "auto":
            return {}
        raise ConfigError(f"generation_config={choice!r}: there is no {path}; use auto, vllm or a directory with one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        defaults = {key: content[key] for key in KEYS if content.get(key) is not None}
        SamplingParams(**defaults)
    except (ValueError, AttributeError, RequestError) as error:
        raise CheckpointError(f"{path}: {error}; --generation-config vllm goes without it") from error
    return defaults
