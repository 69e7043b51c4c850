"""What may be asked: one form, of the right type and size, in its plainest words; and what is refused, with the key."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.errors import RequestError
from forerun.request import SamplingParams
from forerun.structured.request import MAX_BYTES, MAX_DEPTH, StructuredOutputs, from_guided, from_response_format
from tests.structured.forms import FORMS, SCHEMA


@pytest.mark.parametrize("form", [form for form, _ in FORMS.values()] + [{"json_object": True}])
def test_the_plainest_form_reads_back(form: dict[str, Any]) -> None:
    asked = StructuredOutputs.parse(form)
    assert StructuredOutputs.parse(asked.as_dict()) == asked
    assert SamplingParams(structured_outputs=form).structured_outputs == asked.as_dict()


def test_order_of_properties_is_kept() -> None:
    schema = {"properties": {"b": {}, "a": {}}}
    assert StructuredOutputs.parse({"json": schema}).text == '{"properties":{"b":{},"a":{}}}'


def test_objects_are_closed_where_asked() -> None:
    schema = {"properties": {"a": {"properties": {"b": {}}}, "c": {"properties": {}, "additionalProperties": True}}}
    text = StructuredOutputs.parse({"json": schema, "disable_additional_properties": True}).text
    assert text.count('"additionalProperties":false') == 2
    assert text.count('"additionalProperties":true') == 1


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("form", "key", "part"),
    [
        ({}, "", "give one of json"),
        ({"json": None}, "", "give one of json"),
        ({"json": {}, "regex": "a"}, "", "got json, regex"),
        ({"jsn": {}}, "", "unknown key 'jsn'"),
        ({"json": 3}, ".json", "must be a JSON object"),
        ({"json": False}, "", "give one of json"),
        ({"json": "false"}, ".json", "nothing fits"),
        ({"json": "{"}, ".json", "not valid JSON"),
        ({"json": {"a": float("nan")}}, ".json", "cannot be written"),
        ({"json": nested(MAX_DEPTH + 1)}, ".json", "nested more than"),
        ({"regex": ""}, ".regex", "not empty"),
        ({"regex": "a" * (MAX_BYTES + 1)}, ".regex", "at most"),
        ({"regex": 5}, ".regex", "must be a text"),
        ({"choice": []}, ".choice", "list of texts"),
        ({"choice": ["a", ""]}, ".choice", "none of them empty"),
        ({"choice": "ab"}, ".choice", "list of texts"),
        ({"grammar": None, "json_object": "yes"}, ".json_object", "must be true"),
        ({"structural_tag": []}, ".structural_tag", "must be a JSON object"),
        ({"json": {}, "disable_any_whitespace": 1}, ".disable_any_whitespace", "true or false"),
        ({"json": {}, "whitespace_pattern": 1}, ".whitespace_pattern", "must be a text"),
        ([], "", "must be an object"),
    ],
)
def test_what_is_wrong_is_refused_with_the_key(form: Any, key: str, part: str) -> None:
    with pytest.raises(RequestError, match=part) as caught:
        SamplingParams(structured_outputs=form)
    assert caught.value.param == f"structured_outputs{key}"
    assert len(str(caught.value)) < 400


def test_what_response_format_means() -> None:
    assert from_response_format({"type": "text"}) is None
    assert from_response_format({"type": "json_object"}) == {"json_object": True}
    described = {"name": "x", "strict": True, "schema": SCHEMA}
    assert from_response_format({"type": "json_schema", "json_schema": described}) == {"json": SCHEMA}
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    assert from_response_format(tag) == {"structural_tag": tag}
    for wrong in ({}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}):
        with pytest.raises(RequestError) as caught:
            from_response_format(wrong)
        assert caught.value.param == "response_format"


def test_what_the_older_fields_mean() -> None:
    assert from_guided({}) is None
    assert from_guided({"guided_json": {}, "guided_whitespace_pattern": " "}) == {"json": {}, "whitespace_pattern": " "}
    assert from_guided({"guided_choice": ["a"]}) == {"choice": ["a"]}
