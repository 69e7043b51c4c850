"""The form of an answer over HTTP: the fields that say it, refusals that name the field, what reaches the engine."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from forerun.server import structured
from forerun.server.models import ChatBody, CompletionBody
from tests.structured.forms import SCHEMA

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x", "max_tokens": 2},
    "chat": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}
PATHS = {"completions": COMPLETIONS, "chat": CHAT}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}},
         {"json": '{"type":"null"}'}),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, {"regex": "a+"}),
        ({"guided_json": True, "guided_whitespace_pattern": " "}, {"json": "{}", "whitespace_pattern": " "}),
        ({}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("route", ASKS)
def test_what_reaches_the_engine(http: httpx.Client, route: str, fields: dict[str, Any], expected: Any) -> None:
    body = {"completions": CompletionBody, "chat": ChatBody}[route].read(ASKS[route] | fields)
    assert body.sampling().structured_outputs == expected
    assert http.post(PATHS[route], json=ASKS[route] | fields).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema must be"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
         "response_format", "strin"),
        ({"response_format": "json"}, "response_format", ""),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "give one of"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "exclude each other"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "give one of"),
        ({"structured_outputs": {"json": SCHEMA | {"type": 7}}}, "structured_outputs.json", "type must be"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("route", ASKS)
def test_refusals_name_the_field(http: httpx.Client, route: str, fields: dict[str, Any], param: str, part: str) -> None:
    response = http.post(PATHS[route], json=ASKS[route] | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert part in error["message"]
    assert http.post(PATHS[route], json=ASKS[route]).status_code == 200


def test_numbers_of_any_size_reach_the_engine(http: httpx.Client) -> None:
    """A schema crosses the process boundary as text: its numbers may be larger than a message can hold."""
    form = {"json": {"type": "integer", "maximum": 10**39, "description": "x"}}
    assert http.post(COMPLETIONS, json=ASKS["completions"] | {"structured_outputs": form}).status_code == 200


def test_the_older_fields_are_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(structured, "_warned_guided", False)
    monkeypatch.setattr(logging.getLogger("forerun"), "propagate", True)
    for _ in range(3):
        CompletionBody.read(ASKS["completions"] | {"guided_regex": "a"}).sampling()
    assert sum("guided_" in record.getMessage() for record in caplog.records) == 1
