"""Splits reasoning from what follows it. Nothing is lost: the text is the reasoning, the tags and the rest."""

from __future__ import annotations

from forerun.parsers.formats import ReasoningFormat
from forerun.parsers.pieces import Reasoning
from forerun.parsers.reader import Reader, Steps


def read_reasoning(reader: Reader, format: ReasoningFormat) -> Steps[tuple[int, int | None]]:
    """Read on to the end of the reasoning, inside of which the text begins.

    Returns:
        The bytes of the text between which it stands, without its tags; the second is None where the text ended first.
    """
    if space := (yield from reader.spaces()):
        yield Reasoning(space)
    yield from reader.accept(format.start)
    begin = reader.num_bytes
    end = yield from reader.until((format.end,), Reasoning)
    return begin, None if end is None else reader.num_bytes - len(format.end.encode())
