"""Text that comes in chunks, read as if it were all there.

A parser is a generator: it asks a `Reader` for what it wants, and where that is not decided yet, `None` is yielded and
the parser goes on with the next chunk. So no parser knows where chunks end, and none can depend on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from forerun.parsers.pieces import Piece

T = TypeVar("T")
Steps = Generator[Piece | None, None, T]

MAX_NAME = 256  # characters of a function's or a parameter's name
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')  # JSON allows no control character in a string
_SCALAR_RUN = re.compile(r"[\-+.0-9a-zE]*")
_PLAIN_RUN = re.compile(r"[\s:,\-+.0-9a-zE]*")  # what stands between brackets and strings


class Reader:
    """The text that has come and was not taken yet.

    Attributes:
        num_bytes: bytes of all text that was taken.
        num_since_mark: characters taken since `mark`.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._text = ""
        self._ended = False
        self._marked: list[str] | None = None
        self.num_since_mark = 0

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def mark(self, taken: str = "") -> None:
        """Remember what is taken from now on, until `unmark`; `taken` as if it were taken again."""
        self._marked, self.num_since_mark = [taken], len(taken)

    def unmark(self) -> str:
        """All text taken since `mark`."""
        text, self._marked = "".join(self._marked or ()), None
        return text

    def accept(self, literal: str) -> Steps[bool]:
        """Take `literal` where the text goes on with it."""
        while len(self._text) < len(literal) and literal.startswith(self._text) and not self._ended:
            yield None
        if not self._text.startswith(literal):
            return False
        self._take(len(literal))
        return True

    def spaces(self) -> Steps[str]:
        taken = ""
        while True:
            taken += self._take(len(self._text) - len(self._text.lstrip()))
            if self._text or self._ended:
                return taken
            yield None

    def until(self, tags: Sequence[str], wrap: Callable[[str], Piece]) -> Steps[str | None]:
        """Yield the text before the first of the tags as it comes, take the tag and return it; None: the text ended."""
        while True:
            places = [(place, tag) for tag in tags if (place := self._text.find(tag)) >= 0]
            if places:
                place, tag = min(places)
                if place:
                    yield wrap(self._take(place))
                self._take(len(tag))
                return tag
            held = 0 if self._ended else max((_overlap(self._text, tag) for tag in tags), default=0)
            if len(self._text) > held:
                yield wrap(self._take(len(self._text) - held))
            if self._ended:
                return None
            yield None

    def before(self, tag: str, limit: int | None = None) -> Steps[str | None]:
        """Take the text before `tag`, and the tag; None, with nothing taken, where the text ends first or that which
        comes before is longer than `limit`."""
        start = 0
        while (place := self._text.find(tag, start)) < 0:
            start = max(0, len(self._text) - len(tag) + 1)
            if self._ended or (limit is not None and start > limit):
                return None
            yield None
        if limit is not None and place > limit:
            return None
        text = self._take(place)
        self._take(len(tag))
        return text

    def starts_with(self, character: str) -> Steps[bool]:
        """Whether the text goes on with this character, which is not taken."""
        while not self._text and not self._ended:
            yield None
        return self._text.startswith(character)

    def json(self, wrap: Callable[[str], Piece] | None = None) -> Steps[str | None]:
        """Take one JSON value, yielding its text as it comes where `wrap` says as what; the whole of it. None where it
        is no JSON: then what was taken ends where it went wrong."""
        scanner, taken = _JsonScanner(), ""
        while True:
            if piece := self._take(scanner.feed(self._text)):
                taken += piece
                if wrap is not None:
                    yield wrap(piece)
            if scanner.done or scanner.failed or self._ended:
                break
            yield None
        return taken if not scanner.failed and _is_json(taken) else None

    def _take(self, number: int) -> str:
        taken, self._text = self._text[:number], self._text[number:]
        self.num_bytes += len(taken) if taken.isascii() else len(taken.encode("utf-8", "replace"))
        if self._marked is not None:
            self._marked.append(taken)
            self.num_since_mark += number
        return taken


class _JsonScanner:
    """Finds where a JSON value ends. That all of it is JSON is not its business, only that it may still become so."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._started = False

    def feed(self, text: str) -> int:
        """How many of the characters belong to the value; the first that cannot sets `failed`."""
        place = 0
        while place < len(text) and not (self.done or self.failed):
            place = self._string(text, place) if self._in_string else self._structure(text, place)
        return place

    def _string(self, text: str, place: int) -> int:
        if self._escaped:
            self._escaped = False
            return place + 1
        match = _STRING_RUN.match(text, place)
        assert match is not None
        if (place := match.end()) == len(text):
            return place
        if text[place] == "\\":
            self._escaped = True
        elif text[place] == '"':
            self._in_string = False
            self.done = self._depth == 0
        else:
            self.failed = True
            return place
        return place + 1

    def _structure(self, text: str, place: int) -> int:
        character = text[place]
        if self._depth == 0 and self._started:  # a number or a word, which ends where something else begins
            match = _SCALAR_RUN.match(text, place)
            assert match is not None
            self.done = match.end() < len(text)
            return match.end()
        self._started = True
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.done = self._depth == 0
        elif self._depth and (match := _PLAIN_RUN.match(text, place)) is not None and match.end() > place:
            return match.end()
        elif self._depth or not (character.isalnum() or character == "-"):
            self.failed = True
            return place
        return place + 1


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _overlap(text: str, tag: str) -> int:
    """How much of the text's end may be the beginning of the tag."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
