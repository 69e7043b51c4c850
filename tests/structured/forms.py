"""One of each kind of form, with an independent judge of its texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = {
    "type": "object",
    "properties": {
        "server": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["draft", "target"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["server", "age", "kind", "list"],
    "additionalProperties": False,
}
CHOICES = ["serving", "the server", 'a "quoted" é']
TOOL = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Fits(Strict):
    """SCHEMA, as pydantic says it."""

    server: Annotated[str, Field(max_length=5)]
    age: Annotated[int, Field(ge=0, le=99)]
    kind: Literal["draft", "target"]
    list: Annotated[list[bool], Field(max_length=2)]


class Call(Strict):
    a: Annotated[int, Field(ge=0, le=99)]


CALL = re.compile(r"<call=add>(\{.*\})</call>", re.S)


def fits_schema(text: str) -> bool:
    return Fits.model_validate_json(text) is not None


def is_call(text: str) -> bool:
    found = CALL.fullmatch(text)
    assert found, text
    return Call.model_validate_json(found[1]) is not None


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


Form = tuple[dict[str, Any], Callable[[str], bool]]
FORMS: dict[str, Form] = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, fits_schema),
    "json_text": ({"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}, fits_schema),
    "regex": ({"regex": "[a-z]{3,8}-[0-9]{2,4}"}, lambda t: re.fullmatch("[a-z]{3,8}-[0-9]{2,4}", t) is not None),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "lark": (
        {"grammar": 'start: "(" NUM ("," NUM)? ")"\nNUM: /[0-9]{1,3}/'},
        lambda t: re.fullmatch(r"\(\d{1,3}(,\d{1,3})?\)", t) is not None,
    ),
    "ebnf": (
        {"grammar": 'root ::= "yes " word | "no"\nword ::= [a-c] [x-z]'},
        lambda t: re.fullmatch("yes [a-c][x-z]|no", t) is not None,
    ),
    "structural_tag": (
        {
            "disable_any_whitespace": True,
            "structural_tag": {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<call="],
                    "at_least_one": True,
                    "stop_after_first": True,
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<call=add>",
                            "content": {"type": "json_schema", "json_schema": TOOL},
                            "end": "</call>",
                        }
                    ],
                },
            },
        },
        is_call,
    ),
}
