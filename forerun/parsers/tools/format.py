"""What a format of tool calls is, and the JSON object that most of them write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from forerun.parsers.pieces import CallArguments, CallBroken, CallStart, Content, Piece
from forerun.parsers.reader import Reader, Steps

Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]  # name -> JSON schema of the parameters

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")


class ToolFormat(Protocol):
    """How a model writes calls.

    Attributes:
        tags: what it is recognised by; in some tokenizers special tokens, which must not be left out of its text.
    """

    @property
    def tags(self) -> tuple[str, ...]: ...

    def read(self, reader: Reader, functions: Functions) -> Steps[None]:
        """Read on to the end of the text. What is no call is content, whatever it is: nothing is raised."""
        ...

    def grammar(self, functions: Functions, *, required: bool, parallel: bool) -> dict[str, Any]:
        """vLLM's `structured_outputs` under which a text in this format calls these functions and no others, with
        arguments that match their schemas.

        Args:
            required: it calls at least one; else it may be any text, and calls only where it begins one.
            parallel: it may call several.
        """
        ...


class Call:
    """Reads one call and knows how much of it was shown, so that a call which breaks off can be told.

    Args:
        known: an object that names none of these functions is no call; None: it may name any.
    """

    def __init__(self, reader: Reader, known: Functions | None = None) -> None:
        self.reader = reader
        self._known = known
        self._started = False
        self._shown = 0

    def read(self, steps: Callable[[Call], Steps[bool]], taken: str = "") -> Steps[bool]:
        """Let `steps` read a call and say whether it is one and whole; where not, what it took is no call.

        Args:
            taken: the tag before it, which is taken already.
        """
        self.reader.mark(taken)
        whole = yield from steps(self)
        text = self.reader.unmark()
        if not whole and text:
            yield CallBroken(text, text[self._shown :]) if self._started else Content(text)
        return whole

    def start(self, name: str) -> Piece:
        self._started = True
        return CallStart(name)

    def arguments(self, text: str) -> Piece:
        """Text that was just taken and is passed on as it stands."""
        self._shown = self.reader.num_since_mark
        return CallArguments(text)

    def json_object(self) -> Steps[bool]:
        """A call as `{"name": ..., "arguments": {...}}`; whether it is one and whole. Other keys are passed over."""
        reader, name, held = self.reader, "", "{}"
        if not (yield from reader.accept("{")):
            return False
        while True:
            key = yield from self._key()
            if key in ARGUMENT_KEYS:
                value = yield from self._arguments(name)
                held = value or held
            else:
                value = yield from reader.json()
            if key is None or value is None:
                return False
            if key == NAME_KEY:
                name = name or _text(value) or ""
                if not name or (self._known is not None and name not in self._known):
                    return False
            yield from reader.spaces()
            if (yield from reader.accept("}")):
                break
            if not (yield from reader.accept(",")):
                return False
        if name and not self._started:
            yield self.start(name)
            yield CallArguments(held)
        return bool(name)

    def _key(self) -> Steps[str | None]:
        """A key and what separates it from its value."""
        yield from self.reader.spaces()
        key = _text((yield from self.reader.json()))
        yield from self.reader.spaces()
        if not (yield from self.reader.accept(":")):
            return None
        yield from self.reader.spaces()
        return key

    def _arguments(self, name: str) -> Steps[str | None]:
        """An object, shown as it comes where the name is known."""
        if not (yield from self.reader.starts_with("{")):
            return None
        if not name or self._started:
            return (yield from self.reader.json())
        yield self.start(name)
        return (yield from self.reader.json(self.arguments))


def _text(value: str | None) -> str | None:
    """The string that a JSON text is; None where it is something else."""
    read = None if value is None else json.loads(value)
    return read if isinstance(read, str) else None
