"""How a speculative configuration is refused: one printable line. No torch here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from forerun.errors import ConfigError

SHOWN_CHARS = 60
_PREFIX = "speculative_config: "


def refuse(problem: str) -> NoReturn:
    raise ConfigError(_PREFIX + problem)


@contextmanager
def within(place: str) -> Iterator[None]:
    """Puts a place before what is refused inside of it; "" leaves it as it is."""
    try:
        yield
    except ConfigError as error:
        if not place:
            raise
        refuse(f"{place}: {str(error).removeprefix(_PREFIX)}")


def printable(text: str) -> str:
    """One line for a message: control characters escaped, cut where it gets long."""
    text = text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(value: object) -> str:
    """A value as JSON for a message; as Python where it is not JSON."""
    try:
        return printable(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return printable(repr(value))
    except (ValueError, RecursionError):  # an int of thousands of digits; a structure without end
        return f"{type(value).__name__} too large to show"


def quoted(words: Iterable[str]) -> str:
    return ", ".join(f'"{word}"' for word in words)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint with the nearest of the known names, "" where none is near."""
    nearest = difflib.get_close_matches(word[:SHOWN_CHARS].strip().lower().replace("-", "_"), list(known), n=1)
    return f'; did you mean "{nearest[0]}"?' if nearest else ""
