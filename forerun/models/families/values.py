"""Typed reading of a checkpoint's metadata."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from forerun.errors import CheckpointError

REQUIRED: Any = object()


class Values:
    """A checkpoint's metadata, read with its types checked. A missing or null key gives the default.

    Attributes:
        read: the keys that were asked for.

    Raises (every getter):
        CheckpointError: the key is missing and has no default, or its value is of another type.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise CheckpointError(f"{self.prefix}{key} is missing")
        return default

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        value: int = self._typed(key, default, "an integer", _is_integer)
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        value = self._typed(key, default, "a number", _is_number)
        try:
            return float(value)
        except OverflowError:
            raise self._error(key, value, "a number") from None

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value: bool = self._typed(key, default, "true or false", lambda v: isinstance(v, bool))
        return value

    def text(self, key: str, default: Any = REQUIRED) -> str:
        value: str = self._typed(key, default, "a string", lambda v: isinstance(v, str))
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = self._typed(key, {}, "an object", lambda v: isinstance(v, dict))
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._typed(key, [], "a list of numbers", lambda v: isinstance(v, list) and all(map(_is_number, v)))
        return tuple(map(float, value))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.get(key, [])
        ids = list(value) if isinstance(value, list | tuple) else [value]
        if not all(_is_integer(i) and i >= 0 for i in ids):
            raise self._error(key, value, "a token id or a list of them")
        return tuple(ids)

    def refuse(self, key: str, harmless: Collection[Any]) -> None:
        """Fail unless the key is missing, null or one of the harmless values."""
        value = self.get(key)
        if value is not None and value not in harmless:
            raise CheckpointError(f"{self.prefix}{key}={reprlib.repr(value)} is not supported")

    def refuse_unread(self, switches: Mapping[str, tuple[Any, ...]]) -> None:
        """Fail where the checkpoint sets one of these keys, and not to a harmless value, and nobody asked for it."""
        for key, harmless in switches.items():
            if key not in self.read:
                self.refuse(key, harmless)

    def _typed(self, key: str, default: Any, what: str, check: Callable[[Any], bool]) -> Any:
        value = self.get(key, default)
        if value is not default and not check(value):
            raise self._error(key, value, what)
        return value

    def _error(self, key: str, value: Any, what: str) -> CheckpointError:
        return CheckpointError(f"{self.prefix}{key} must be {what}, got {reprlib.repr(value)}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)
