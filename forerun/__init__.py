"""forerun: a server for large language models whose core is lossless speculative decoding."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before torch loads OpenMP. Threads that spin while they wait take the core from the one they wait for: with another
# process on the machine a step of SmolLM2 took 1,170 ms with OpenMP's own setting, 160 ms with this one.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from forerun.engine.config import EngineConfig
    from forerun.llm import LLM
    from forerun.request import SamplingParams

__all__ = ["LLM", "EngineConfig", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {"LLM": "forerun.llm", "EngineConfig": "forerun.engine.config", "SamplingParams": "forerun.request"}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: the command line must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
