"""What a request may ask of the form of its text, checked as far as that goes without compiling. No llguidance here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import RequestError

FIELD = "structured_outputs"
MAX_BYTES = 256 << 10  # of a schema, grammar, expression or list of choices
MAX_DEPTH = 100  # of nested JSON; the readers behind this one recurse
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
# What vLLM knows beside these, at the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"_backend": ("auto", "guidance"), "disable_fallback": (False, True)}


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of a text.

    Attributes:
        kind: one of `KINDS`.
        text: a JSON text for `json`, `structural_tag` and `choice` (a list of texts), else as given; "" for
            `json_object`.
        whitespace: JSON may have whitespace between its parts.
        whitespace_pattern: expression that this whitespace must match; None: any.
    """

    kind: str
    text: str
    whitespace: bool = True
    whitespace_pattern: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> StructuredOutputs:
        """
        Args:
            given: one of `KINDS` and any of `OPTIONS`; None counts as absent.
        Raises:
            RequestError: none or several kinds, an unknown key, a wrong type, too large.
        """
        if not isinstance(given, Mapping):
            raise RequestError(f"{FIELD} must be an object, got {given!r:.80}", FIELD)
        values = {str(name): value for name, value in given.items() if value is not None}
        for name, value in values.items():
            if name not in (*KINDS, *OPTIONS) and value not in _NEUTRAL.get(name, ()):
                raise _refusal(f"unknown key {name[:100]!r}: known are {', '.join((*KINDS, *OPTIONS))}")
        kinds = [name for name in KINDS if name in values and values[name] is not False]
        if len(kinds) != 1:
            raise _refusal(f"give one of {', '.join(KINDS)}, got {', '.join(kinds) or 'none'}")
        kind = kinds[0]
        text = _text(kind, values[kind], _flag(values, "disable_additional_properties"))
        if len(text.encode()) > MAX_BYTES:
            raise _refusal(f"{kind} has {len(text.encode())} bytes, at most {MAX_BYTES} are taken", kind)
        pattern = values.get("whitespace_pattern")
        if pattern is not None:
            _check_text("whitespace_pattern", pattern)
        return cls(kind, text, not _flag(values, "disable_any_whitespace"), pattern)

    def as_dict(self) -> dict[str, Any]:
        """The plainest form of it, which `parse` reads back: texts and booleans only."""
        value: Any = {"json_object": True, "choice": None}.get(self.kind, self.text)
        plain: dict[str, Any] = {self.kind: json.loads(self.text) if value is None else value}
        if not self.whitespace:
            plain["disable_any_whitespace"] = True
        if self.whitespace_pattern is not None:
            plain["whitespace_pattern"] = self.whitespace_pattern
        return plain


def from_response_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """`response_format` as `structured_outputs`; None for plain text.

    Raises:
        RequestError: an unknown type, or a schema that is missing.
    """
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema", described.get("json_schema")) if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise RequestError("response_format.json_schema.schema must be a JSON schema", "response_format")
        return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": dict(given)}
    known = "text, json_object, json_schema or structural_tag"
    raise RequestError(f"response_format.type must be {known}, got {kind!r:.80}", "response_format")


GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}


def from_guided(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """vLLM's older `guided_*` fields as `structured_outputs`; None where none is given."""
    values: dict[str, Any] = {kind: given[name] for name, kind in GUIDED.items() if given.get(name) is not None}
    if not values:
        return None
    if given.get("guided_whitespace_pattern") is not None:
        values["whitespace_pattern"] = given["guided_whitespace_pattern"]
    return values


def _refusal(reason: str, key: str = "") -> RequestError:
    return RequestError(f"{FIELD}: {reason}", f"{FIELD}.{key}" if key else FIELD)


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise _refusal(f"{name} must be true or false, got {value!r:.80}", name)
    return value


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal(f"{name} must be a text that is not empty, got {value!r:.80}", name)
    return value


def _text(kind: str, value: Any, close_objects: bool) -> str:
    if kind == "json_object":
        if value is not True:
            raise _refusal(f"json_object must be true, got {value!r:.80}", kind)
        return ""
    if kind in ("regex", "grammar"):
        return _check_text(kind, value)
    if kind == "choice":
        if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
            raise _refusal(f"choice must be a list of texts, none of them empty, got {value!r:.80}", kind)
        return _dump(kind, list(dict.fromkeys(value)))
    document = _read(kind, value) if isinstance(value, str) else value
    if not isinstance(document, Mapping) and not (kind == "json" and isinstance(document, bool)):
        raise _refusal(f"{kind} must be a JSON object, or the text of one, got {value!r:.80}", kind)
    if isinstance(document, bool):
        if not document:
            raise _refusal("json=false is a schema that nothing fits", kind)
        document = {}
    _check_depth(kind, document)
    return _dump(kind, _closed(document) if close_objects and kind == "json" else document)


def _read(kind: str, text: str) -> Any:
    if len(text) > MAX_BYTES:
        raise _refusal(f"{kind} has {len(text)} characters, at most {MAX_BYTES} bytes are taken", kind)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"{kind} is not valid JSON: {error}", kind) from None


def _dump(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"{kind} cannot be written as JSON: {error}", kind) from None


def _check_depth(kind: str, document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, Mapping | list | tuple)
            for inner in (value.values() if isinstance(value, Mapping) else value)
        ]
        if not level:
            return
    raise _refusal(f"{kind} is nested more than {MAX_DEPTH} deep", kind)


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` on every object that lists its properties and does not say."""
    if isinstance(schema, list | tuple):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    says = {"additionalProperties", "patternProperties", "unevaluatedProperties"} & closed.keys()
    if isinstance(closed.get("properties"), dict) and not says:
        closed["additionalProperties"] = False
    return closed
