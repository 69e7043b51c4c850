"""Calls as DeepSeek's models write them: R1 and V3 with a code block around the arguments, V3.1 without."""

from __future__ import annotations

from typing import Any

from forerun.parsers.pieces import Content
from forerun.parsers.reader import MAX_NAME, Reader, Steps
from forerun.parsers.tools.format import Call, Functions
from forerun.parsers.tools.grammar import tagged_calls

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
KIND = "function"
FENCE, FENCE_END = "```json", "```"


class DeepSeek:
    """Both forms are read; `fenced` says which one a grammar makes the model write."""

    tags = (CALLS, CALL, SEPARATOR)

    def __init__(self, *, fenced: bool) -> None:
        self._fenced = fenced

    def read(self, reader: Reader, functions: Functions) -> Steps[None]:
        while (tag := (yield from reader.until((CALLS, CALL), Content))) is not None:
            while (yield from Call(reader).read(self._first if tag == CALL else self._next, tag)):
                tag = ""

    def _next(self, call: Call) -> Steps[bool]:
        yield from call.reader.spaces()
        return (yield from call.reader.accept(CALL)) and (yield from self._first(call))

    def _first(self, call: Call) -> Steps[bool]:
        """What follows the tag that begins a call."""
        reader = call.reader
        name = yield from reader.before(SEPARATOR, MAX_NAME)
        fenced = name == KIND and not (yield from reader.starts_with("{"))
        if fenced:
            name = yield from reader.before("\n", MAX_NAME)
            yield from reader.accept(FENCE)
            yield from reader.spaces()
        if not name or not (yield from reader.starts_with("{")):
            return False
        yield call.start(name)
        if (yield from reader.json(call.arguments)) is None:
            return False
        yield from reader.spaces()
        if fenced:
            yield from reader.accept(FENCE_END)
            yield from reader.spaces()
        yield from reader.accept(CALL_END)
        yield from reader.spaces()
        yield from reader.accept(CALLS_END)
        return True

    def grammar(self, functions: Functions, *, required: bool, parallel: bool) -> dict[str, Any]:
        head, begin, end = (
            ("\n" + FENCE + "\n", KIND + SEPARATOR, "\n" + FENCE_END) if self._fenced else (SEPARATOR, "", "")
        )
        begins = {name: f"{CALL}{begin}{name}{head}" for name in functions}
        return tagged_calls(functions, begins, end + CALL_END, CALL, required=required, parallel=parallel)
