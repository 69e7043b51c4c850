"""Calls as Qwen3-Coder writes them: tags around the function and around each parameter, whose values are plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from forerun.parsers.pieces import CallArguments, Content
from forerun.parsers.reader import MAX_NAME, Reader, Steps
from forerun.parsers.tools.format import Call, Functions, Schema

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_REFERENCES = 8  # from schema to schema


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
        """A Lark grammar as llguidance reads it: each value is held to its parameter's schema."""
        rules = [rule for place, (name, schema) in enumerate(functions.items()) for rule in _rules(place, name, schema)]
        if required:
            start = 'call ("\\n" call)*' if parallel else "call"
        else:
            start = "OTHER? (call OTHER?)*" if parallel else "OTHER? (call OTHER?)?"
            rules.append(f"OTHER: /{_OTHER}/")
        any_function = " | ".join(f"f{place}" for place in range(len(functions)))
        call = f"{_text(CALL + chr(10))} ({any_function}) {_text(chr(10) + CALL_END)}"
        return {"grammar": "\n".join([f"start: {start}", f"call: {call}", f"PLAIN: /{_PLAIN}/", *rules])}


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
    """The parameters' schemas; one that refers to another of the same document is that one."""
    properties = schema.get("properties")
    return {key: _meant(of, schema) for key, of in properties.items()} if isinstance(properties, Mapping) else {}


def _meant(schema: Any, document: Schema) -> Any:
    for _ in range(MAX_REFERENCES):
        if not (isinstance(schema, Mapping) and str(schema.get("$ref")).startswith("#/")):
            break
        target: Any = document
        for part in str(schema["$ref"])[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target
    return schema


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


_OTHER = "([^<]|<[^tf])+"  # text that begins neither a call nor a function
_PLAIN = "([^<]|<[^\\/])*\\n<\\/parameter>\\n"  # a value that is text, to the end of its tag
_AFTER_VALUE = f"\n{PARAMETER_END}\n"


def _rules(place: int, name: str, schema: Schema) -> list[str]:
    """The rules of one function, and of each of its parameters."""
    required = _list(schema.get("required"))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}  # what the parts may refer to
    rules, parts = [], [_text(f"{FUNCTION}{name}>\n")]
    for at, (key, of) in enumerate(_properties(schema).items()):
        rules.append(f"f{place}p{at}: {_text(f'{PARAMETER}{key}>{chr(10)}')} {_value_rule(of, shared)}")
        parts.append(f"f{place}p{at}" if key in required else f"f{place}p{at}?")
    return [f"f{place}: {' '.join([*parts, _text(FUNCTION_END)])}", *rules]


def _value_rule(schema: Any, shared: Mapping[str, Any]) -> str:
    values = _list(schema.get("enum")) if isinstance(schema, Mapping) else []
    if values:
        written = " | ".join(_text(v if isinstance(v, str) else json.dumps(v)) for v in values)
        return f"({written}) {_text(_AFTER_VALUE)}"
    if "string" in _types(schema):
        return "PLAIN"
    return f"%json {json.dumps({**shared, **schema})} {_text(_AFTER_VALUE)}"


def _text(text: str) -> str:
    """As Lark writes it."""
    return json.dumps(text, ensure_ascii=False)
