"""Which method a draft's name and config.json speak of. No torch here, and nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.spec.keys import METHOD_ALIASES, METHODS

MAX_CONFIG_BYTES = 1 << 20

# Parts of a name, in the order in which vLLM looks for them.
_NAME_PARTS = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
_ARCHITECTURE_PARTS = (
    ("eagle3", "eagle3"),
    ("eagle", "eagle"),
    ("dflash", "dflash"),
    ("museglimmerassistant", "dflash"),
    ("dspark", "dspark"),
)
_SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}


def suggested_method(model: str) -> tuple[str, str] | None:
    """The method that a draft's name, or else its config.json, speaks of, and by what; None where nothing does.

    Of the path only the last component counts: a folder above it says nothing of the model.
    """
    name = model.rstrip("/").rpartition("/")[2].lower()
    for part, method in _NAME_PARTS:
        if part in name:
            return method, f'"{part}" in its name'
    return _of_config(_read_config(model))


def _of_config(config: Mapping[str, Any]) -> tuple[str, str] | None:
    kind = config.get("speculators_model_type")
    if isinstance(kind, str) and kind in _SPECULATORS:
        return _SPECULATORS[kind], f'"speculators_model_type": "{kind}" in its config.json'
    architectures = config.get("architectures")
    for architecture in architectures if isinstance(architectures, list) else ():
        for part, method in _ARCHITECTURE_PARTS:
            if isinstance(architecture, str) and part in architecture.lower():
                return method, f'the architecture "{architecture[:60]}" in its config.json'
    kind = config.get("model_type")
    if isinstance(kind, str) and METHOD_ALIASES.get(kind, kind) in METHODS:
        return METHOD_ALIASES.get(kind, kind), f'"model_type": "{kind}" in its config.json'
    return None


def _read_config(model: str) -> Mapping[str, Any]:
    """The config.json of a directory; empty where there is none that can be read, which whoever loads it will say."""
    try:
        with (Path(model) / "config.json").open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
