"""A choice of tools that promises a call: the target, however random, writes calls that the parser of its format reads,
drafts or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.engine import Engine
from forerun.parsers.message import MessageParser
from forerun.parsers.pieces import CallArguments, CallBroken, CallStart
from forerun.parsers.tools import functions_of, tool_format, tool_grammar
from forerun.request import SamplingParams
from tests.tiny_engine import SUFFIX, make_engine, prompts, run

PARSERS = ["hermes", "qwen3_coder", "llama3_json", "deepseek_v3", "deepseek_v31", "tags:<call>,</call>"]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=[None, SUFFIX, {"method": ["grammar", "suffix"], "num_speculative_tokens": 6}])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Engine:
    return make_engine(tiny_model, request.param)


def calls_of(text: str, parser: str) -> list[tuple[str, Any]]:
    """Name and arguments of each call in a text, none of which broke off."""
    reader = MessageParser(None, tool_format(parser), functions_of(TOOLS))
    calls: list[tuple[str, str]] = []
    for piece in [*reader.push(text), *reader.finish()]:
        assert not isinstance(piece, CallBroken), text
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            name, arguments = calls.pop()
            calls.append((name, arguments + piece.text))
    return [(name, json.loads(arguments)) for name, arguments in calls]


def texts(engine: Engine, form: dict[str, Any] | None, temperature: float) -> list[str]:
    if form is not None and "json" in form:
        form = form | {"disable_any_whitespace": True}  # which random weights would write without end
    params = SamplingParams(temperature=temperature, max_tokens=180, structured_outputs=form)
    results = run(engine, [(prompt[:20], params) for prompt in prompts(3)])
    return [result.text for result in results if result.last.finish_reason == "stop"]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("parser", PARSERS)
def test_a_named_function_is_called_once_with_arguments_of_its_schema(
    parser: str, temperature: float, engine: Engine
) -> None:
    form = tool_grammar(TOOLS, NAMED, True, tool_format(parser))
    answers = texts(engine, form, temperature)
    assert answers
    for text in answers:
        ((name, arguments),) = calls_of(text, parser)
        assert name == "weather"
        assert arguments["city"] in ("Rome", "Oslo")
        assert arguments["days"] in range(1, 10)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_is_required_and_one_at_the_most_where_they_are_not_parallel(parser: str, engine: Engine) -> None:
    form = tool_grammar(TOOLS, "required", False, tool_format(parser))
    answers = texts(engine, form, 1.0)
    for text in answers:
        ((name, _),) = calls_of(text, parser)
        assert name in ("weather", "now")


@pytest.mark.parametrize("parser", PARSERS)
def test_calls_of_strict_tools_keep_their_schema_where_there_are_any(parser: str, engine: Engine) -> None:
    """Under a free choice text may stand without calls; whatever call there is has the schema's arguments."""
    form = tool_grammar(TOOLS, "auto", True, tool_format(parser))
    assert form is not None
    for text in texts(engine, form, 1.0):
        for name, arguments in calls_of(text, parser):
            assert name == "now" or arguments["city"] in ("Rome", "Oslo")
