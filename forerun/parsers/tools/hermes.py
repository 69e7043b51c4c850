"""Calls as JSON between a pair of tags: Hermes', which Qwen2.5 and Qwen3 write too, or any other."""

from __future__ import annotations

import json
from typing import Any

from forerun.parsers.pieces import Content
from forerun.parsers.reader import Reader, Steps
from forerun.parsers.tools.format import Call, Functions
from forerun.parsers.tools.grammar import tagged_calls


class JsonBetweenTags:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, white space allowed between all parts."""

    def __init__(self, start: str = "<tool_call>", end: str = "</tool_call>") -> None:
        self.start, self.end = start, end
        self.tags = (start, end)

    def read(self, reader: Reader, functions: Functions) -> Steps[None]:
        while (yield from reader.until((self.start,), Content)) is not None:
            yield from Call(reader).read(self._call, taken=self.start)

    def _call(self, call: Call) -> Steps[bool]:
        yield from call.reader.spaces()
        if not (yield from call.json_object()):
            return False
        yield from call.reader.spaces()
        yield from call.reader.accept(self.end)  # a text may end without it
        return True

    def grammar(self, functions: Functions, *, required: bool, parallel: bool) -> dict[str, Any]:
        begin = {name: f'{self.start}\n{{"name": {json.dumps(name)}, "arguments": ' for name in functions}
        return tagged_calls(functions, begin, f"}}\n{self.end}", self.start, required=required, parallel=parallel)
