"""What the extra `bench` brings, imported where it is needed."""

from __future__ import annotations

import importlib
from typing import Any

from forerun.errors import ConfigError


def extra(module: str, what: str) -> Any:
    """The module, or one line that says how to get it.

    Args:
        what: that needs it, as the beginning of the message.
    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ConfigError(f"{what} needs {error.name}: install it with pip install 'forerun[bench]'") from None
