"""Calls as Qwen3-Coder writes them: tags around the function and around each parameter, whose values are plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from forerun.parsers.pieces import CallArguments, Content
from forerun.parsers.reader import MAX_NAME, Reader, Steps
from forerun.parsers.tools.format import Call, Functions, Schema

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenXml:
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`. A value is text where the
    function's schema says so or nothing, else JSON where it is any."""

    tags = (CALL, FUNCTION)

    def read(self, reader: Reader, functions: Functions) -> Steps[None]:
        while (tag := (yield from reader.until((CALL, FUNCTION), Content))) is not None:
            bare = tag == FUNCTION  # some leave the outer tag out
            yield from Call(reader).read(partial(self._call, functions=functions, bare=bare), tag)

    def _call(self, call: Call, functions: Functions, bare: bool) -> Steps[bool]:
        reader = call.reader
        if not bare:
            yield from reader.spaces()
            if not (yield from reader.accept(FUNCTION)):
                return False
        name = yield from reader.before(">", MAX_NAME)
        if not name:
            return False
        yield call.start(name)
        schemas = _properties(functions.get(name, {}))
        written = "{"
        while True:
            yield from reader.spaces()
            if (yield from reader.accept(FUNCTION_END)):
                break
            if not (yield from reader.accept(PARAMETER)):
                return False
            key = yield from reader.before(">", MAX_NAME)
            value = None if key is None else (yield from reader.before(PARAMETER_END))
            if key is None or value is None:
                return False
            yield call.arguments(f"{written}{json.dumps(key)}: {_value(value, schemas.get(key))}")
            written = ", "
        yield CallArguments("{}" if written == "{" else "}")
        if not bare:
            yield from reader.spaces()
            yield from reader.accept(CALL_END)
        return True

    def grammar(self, functions: Functions, *, required: bool, parallel: bool) -> dict[str, Any]:
        """A regular expression: the values of a parameter are held to its type, the parts of an object are not."""
        calls = "|".join(_function_pattern(name, schema) for name, schema in functions.items())
        call = f"{CALL}\\n(?:{calls})\\n{CALL_END}"
        if not required:
            text = r"(?:[^<]|<[^tf])*"
            return {"regex": f"{text}(?:{call}{text}){'*' if parallel else '?'}"}
        return {"regex": f"{call}(?:\\n{call})*" if parallel else call}


def _value(text: str, schema: Any) -> str:
    """A parameter's text as JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    if "string" not in types:
        for candidate in (text.strip(), text.strip().lower()):  # True and None are Python's
            try:
                return json.dumps(json.loads(candidate), ensure_ascii=False, allow_nan=False)
            except (ValueError, RecursionError):
                continue
    elif "null" in types and text == "null":
        return text
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: Schema) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names, in its choices too; a parameter of which nothing is known is text."""
    if not isinstance(schema, Mapping):
        return {"string"}
    choices = [choice for key in ("anyOf", "oneOf") for choice in _list(schema.get(key))]
    named = [s.get("type") for s in (schema, *choices) if isinstance(s, Mapping)]
    kinds = [kind for entry in named for kind in (entry if isinstance(entry, list) else [entry])]
    return {kind for kind in kinds if isinstance(kind, str)} or {"string"}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_PATTERNS = {
    "integer": r"-?\d+",
    "number": r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?",
    "boolean": "true|false",
    "null": "null",
}
_ANY_TEXT = r"(?:[^<]|<[^/])*"


def _function_pattern(name: str, schema: Schema) -> str:
    required = _list(schema.get("required"))
    parts = ""
    for key, of in _properties(schema).items():
        part = f"{PARAMETER}{re.escape(key)}>\\n(?:{_value_pattern(of)})\\n{PARAMETER_END}\\n"
        parts += part if key in required else f"(?:{part})?"
    return f"{FUNCTION}{re.escape(name)}>\\n{parts}{FUNCTION_END}"


def _value_pattern(schema: Any) -> str:
    values = _list(schema.get("enum")) if isinstance(schema, Mapping) else []
    if values:
        return "|".join(re.escape(v if isinstance(v, str) else json.dumps(v)) for v in values)
    return "|".join(sorted({_PATTERNS.get(kind, _ANY_TEXT) for kind in _types(schema)}))
