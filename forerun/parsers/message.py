"""One message from its text: reasoning, content and tool calls, as the text comes."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.parsers.formats import ReasoningFormat
from forerun.parsers.pieces import CallArguments, CallStart, Content, Piece
from forerun.parsers.reader import Reader, Steps
from forerun.parsers.reasoning import read_reasoning
from forerun.parsers.tools.format import Functions, ToolFormat


class MessageParser:
    """Turns a text that comes in chunks into pieces, whatever the chunks are.

    White space beside a tool call belongs to the call: it is no content.

    Args:
        reasoning: how reasoning is marked; None where the text begins outside of it.
        tools: how calls are written; None: there are none.
        functions: the functions that may be called, with the schema of their parameters.
    Attributes:
        reasoning_span: the bytes of the text between which the reasoning stands; the second is None until it ends.
    """

    def __init__(
        self, reasoning: ReasoningFormat | None, tools: ToolFormat | None = None, functions: Functions | None = None
    ) -> None:
        self.reasoning_span: tuple[int, int | None] = (0, 0 if reasoning is None else None)
        self._reader = Reader()
        self._steps = self._read(reasoning, tools, functions or {})
        self._trims = tools is not None
        self._space = ""  # the end of the content so far
        self._after_call = False  # and nothing but white space since

    def push(self, text: str) -> list[Piece]:
        self._reader.add(text)
        return list(self._trimmed())

    def finish(self) -> list[Piece]:
        """No text follows: what was held back."""
        self._reader.end()
        pieces = list(self._trimmed())
        if self._space and not self._after_call:
            pieces.append(Content(self._space))
        self._space = ""
        return pieces

    def _read(self, reasoning: ReasoningFormat | None, tools: ToolFormat | None, functions: Functions) -> Steps[None]:
        if reasoning is not None:
            self.reasoning_span = yield from read_reasoning(self._reader, reasoning)
        if tools is not None:
            yield from tools.read(self._reader, functions)
        yield from self._reader.until((), Content)

    def _trimmed(self) -> Iterator[Piece]:
        for piece in self._steps:
            if piece is None:
                return
            if isinstance(piece, Content) and self._trims:
                text = self._space + piece.text
                kept = text.rstrip()
                self._space = text[len(kept) :]
                if kept:
                    yield Content(kept.lstrip() if self._after_call else kept)
                    self._after_call = False
            else:
                if isinstance(piece, CallStart):
                    self._space = ""
                self._after_call = isinstance(piece, CallStart | CallArguments)
                yield piece
