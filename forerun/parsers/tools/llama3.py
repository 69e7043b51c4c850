"""Calls as Llama 3 writes them: JSON objects, with a tag before them or none."""

from __future__ import annotations

import json
from typing import Any

from forerun.parsers.pieces import Content
from forerun.parsers.reader import Reader, Steps
from forerun.parsers.tools.format import Call, Functions

TAG = "<|python_tag|>"
SEPARATOR = ";"


class Llama3Json:
    """`{"name": ..., "parameters": {...}}`, several separated by semicolons. Without the tag, an answer that begins
    with an object is a call only if it names a function that there is: it may be the JSON that was asked for."""

    tags = (TAG,)

    def read(self, reader: Reader, functions: Functions) -> Steps[None]:
        if space := (yield from reader.spaces()):
            yield Content(space)
        tagged = yield from reader.accept(TAG)
        if tagged or (yield from reader.starts_with("{")):
            yield from self._calls(reader, TAG if tagged else "", None if tagged else functions)
        while (yield from reader.until((TAG,), Content)) is not None:
            yield from self._calls(reader, TAG, None)

    def _calls(self, reader: Reader, taken: str, known: Functions | None) -> Steps[None]:
        while (yield from Call(reader, known).read(self._call, taken)):
            taken = ""

    def _call(self, call: Call) -> Steps[bool]:
        yield from call.reader.spaces()
        if (yield from call.reader.accept(SEPARATOR)):
            yield from call.reader.spaces()
        return (yield from call.json_object())

    def grammar(self, functions: Functions, *, required: bool, parallel: bool) -> dict[str, Any]:
        """One call, which is how Llama 3 was taught: a second one has no place."""
        begins = {name: f'{{"name": {json.dumps(name)}, "parameters": ' for name in functions}
        if required:
            calls = [
                f'{json.dumps(begins[name])} %json {json.dumps(schema)} "}}"' for name, schema in functions.items()
            ]
            return {"grammar": f"start: {' | '.join(calls)}"}
        tags = [{"begin": begins[name], "schema": schema, "end": "}"} for name, schema in functions.items()]
        return {"structural_tag": {"type": "structural_tag", "structures": tags, "triggers": ['{"name": ']}}
