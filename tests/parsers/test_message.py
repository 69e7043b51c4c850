"""Reasoning, content and calls from text, whatever the chunks it comes in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.parsers.formats import ReasoningFormat, reasoning_format
from forerun.parsers.message import MessageParser
from forerun.parsers.pieces import CallArguments, CallBroken, CallStart, Content, Piece, Reasoning
from forerun.parsers.tools import TOOL_FORMATS, tool_format, tool_grammar

FUNCTIONS: dict[str, Any] = {
    "get": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "of": {"type": "object"}},
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}
THINK = reasoning_format("qwen3")
FORMATS = ["hermes", "qwen3_coder", "llama3_json", "deepseek_v3", "deepseek_v31", "tags:[[,]]"]


def write(name: str, call: str, arguments: dict[str, Any]) -> str:
    """A call as a model of this format writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    if name == "hermes":
        return f'<tool_call>\n{{"name": "{call}", "arguments": {text}}}\n</tool_call>'
    if name == "llama3_json":
        return f'<|python_tag|>{{"name": "{call}", "parameters": {text}}}'
    if name == "deepseek_v3":
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call}\n```json\n{text}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
    if name == "deepseek_v31":
        return f"<｜tool▁call▁begin｜>{call}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"  # noqa: RUF001
    if name == "qwen3_coder":
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function={call}>\n{inner}</function>\n</tool_call>"
    return f'[[{{"arguments": {text}, "name": "{call}"}}]]'


@dataclass
class Message:
    """Pieces put together: as a stream shows them, and as a whole answer has them."""

    reasoning: str = ""
    shown: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    content: str = ""
    pieces: list[Piece] = field(default_factory=list)
    num_broken: int = 0


def parse(
    chunks: Sequence[str], tools: str | None = "hermes", reasoning: ReasoningFormat | None = None
) -> tuple[Message, MessageParser]:
    parser = MessageParser(reasoning, None if tools is None else tool_format(tools), FUNCTIONS)
    message = Message()
    for piece in [*(piece for chunk in chunks for piece in parser.push(chunk)), *parser.finish()]:
        message.pieces.append(piece)
        if isinstance(piece, Reasoning):
            message.reasoning += piece.text
        elif isinstance(piece, Content):
            message.content += piece.text
        elif isinstance(piece, CallStart):
            message.calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            name, arguments = message.calls[-1]
            message.calls[-1] = name, arguments + piece.text
        elif isinstance(piece, CallBroken):
            message.calls.pop()
            message.content += piece.text
            message.num_broken += 1
    return message, parser


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


CUTS = st.lists(st.integers(0, 2**20), max_size=12)
PLAIN = st.text(st.sampled_from('ab {}[]"\\,:<>/|;\n\tä家👪'), max_size=12)
WORDS = """<think> </think> <tool_call> </tool_call> <function=get> <function= </function> <parameter=city> </parameter>
    <|python_tag|> {"name":"get","arguments":{"city":"P "}} {"name":"now"} [[ ]] ; } 1e nul \\u00
    <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> function<｜tool▁sep｜>get }``` get<｜tool▁sep｜>{
    <｜tool▁call▁end｜> <｜tool▁calls▁end｜> "arguments":{"a":[1,{"b":"\\""}"""  # noqa: RUF001
BITS = st.sampled_from([*WORDS.split(), "\n```json\n{"])
NOISE = st.lists(BITS | PLAIN, max_size=8).map("".join)
ARGUMENTS = st.fixed_dictionaries(
    {"city": st.text(st.sampled_from('aé家 "\\{}[]\n,'), min_size=1, max_size=8).filter(lambda t: t == t.strip("\n"))},
    optional={"days": st.integers(-5, 99), "of": st.dictionaries(st.text("ab", max_size=2), st.integers(), max_size=2)},
)
MANY = settings(max_examples=150, deadline=None)


@MANY
@given(NOISE, CUTS)
def test_reasoning_loses_nothing_and_shows_nothing_twice_whatever_the_chunks(text: str, places: list[int]) -> None:
    message, parser = parse(cut(text, places), None, THINK)
    head = text.lstrip()
    bare = text[: len(text) - len(head)] + head.removeprefix(THINK.start)
    reasoning, end, content = bare.partition(THINK.end)
    assert (message.reasoning, message.content) == (reasoning, content)
    begin, stop = parser.reasoning_span
    assert (stop is not None) == bool(end)
    assert text.encode()[begin:stop].decode().endswith(message.reasoning.lstrip())


@MANY
@given(st.sampled_from(FORMATS), NOISE, CUTS)
def test_any_text_gives_the_same_in_any_chunks_and_raises_nothing(tools: str, text: str, places: list[int]) -> None:
    whole, _ = parse([text], tools, THINK)
    chunked, _ = parse(cut(text, places), tools, THINK)
    assert (chunked.reasoning, chunked.content, chunked.calls) == (whole.reasoning, whole.content, whole.calls)
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict)
    if not whole.calls and not whole.num_broken and tools not in ("deepseek_v3", "deepseek_v31"):
        assert parse([text], None, THINK)[0].content == whole.content


@MANY
@given(st.sampled_from(FORMATS), st.lists(ARGUMENTS, min_size=1, max_size=3), CUTS)
def test_calls_come_whole_and_in_order_in_any_chunks(
    tools: str, asked: list[dict[str, Any]], places: list[int]
) -> None:
    text = "Let me see.\n" + "\n".join(write(tools, "get", arguments) for arguments in asked)
    message, _ = parse(cut(text, places), tools)
    assert [(name, json.loads(arguments)) for name, arguments in message.calls] == [("get", a) for a in asked]
    assert message.content == "Let me see."


@pytest.mark.parametrize("tools", [name for name in FORMATS if not name.startswith("tags")])
def test_the_name_comes_first_and_arguments_as_they_are_written(tools: str) -> None:
    text = write(tools, "get", {"city": "Paris", "days": 3})
    parser = MessageParser(None, tool_format(tools), FUNCTIONS)
    seen = [(place, piece) for place, character in enumerate(text) for piece in parser.push(character)]
    assert isinstance(seen[0][1], CallStart)
    assert seen[0][0] < text.index("Paris")
    deltas = [place for place, piece in seen if isinstance(piece, CallArguments)]
    assert len(deltas) >= 3
    assert deltas[0] < deltas[-1]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city": oops}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": "Paris"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city": "Pa'),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": "line\nbreak"}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=city>\nParis"),
        ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
        ("llama3_json", '{"name": "nobody", "parameters": {}}'),
        ("llama3_json", '{"title": "get", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>[]<｜tool▁call▁end｜>"),  # noqa: RUF001
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(tools: str, text: str) -> None:
    for chunks in ([text], list(text)):
        message, _ = parse(chunks, tools)
        assert message.calls == []
        assert message.content == text


def test_a_stream_shows_the_rest_of_a_call_that_broke_off() -> None:
    message, _ = parse(list('<tool_call>{"name": "now", "arguments": {"a": 1 oops</tool_call> then'))
    (broken,) = [piece for piece in message.pieces if isinstance(piece, CallBroken)]
    shown = "".join(piece.text for piece in message.pieces if isinstance(piece, CallArguments))
    assert broken.text == '<tool_call>{"name": "now", "arguments": ' + shown + broken.rest
    assert message.content == '<tool_call>{"name": "now", "arguments": {"a": 1 oops</tool_call> then'


def test_values_of_xml_parameters_have_the_types_of_their_schemas() -> None:
    schema = {
        "properties": {
            "text": {"type": "string"},
            "flag": {"type": "boolean"},
            "some": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "list": {"type": "array"},
        }
    }
    values = {"text": "3", "flag": "True", "some": "null", "list": '["a"]', "other": "1"}
    inner = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    parser = MessageParser(None, tool_format("qwen3_coder"), {"f": schema})
    pieces = parser.push(f"<function=f>{inner}</function>")
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert json.loads(arguments) == {"text": "3", "flag": True, "some": None, "list": ["a"], "other": "1"}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": None},
        {"properties": ["city"], "required": 1},
        {"properties": {"city": "text"}, "required": {"city": 1}},
        {"properties": {"city": {"type": {"a": 1}, "anyOf": "x", "oneOf": [1, None], "enum": 5}}},
        {"properties": {"city": {"type": [1, "string"], "enum": [{}, None, "a"]}}},
        {"properties": {"city": {"$ref": "#/properties/city"}}},
        {"properties": {"city": {"$ref": "#/nowhere/at/all"}}},
        {"properties": {"city": {"$ref": 5}}},
    ],
)
def test_a_schema_that_is_none_raises_nothing(schema: Any) -> None:
    for name in TOOL_FORMATS:
        parser = MessageParser(None, tool_format(name), {"get": schema})
        parser.push(write(name, "get", {"city": "Paris"}))
        parser.finish()
        assert tool_format(name).grammar({"get": schema}, required=True, parallel=True)


def test_names_and_tags_of_formats() -> None:
    assert tool_format("tags:<a>,</a>") is not tool_format("tags:<b>,</b>")
    for name in ("", "qwen", "tags:a", "tags:a,a"):
        with pytest.raises(ConfigError, match="hermes, qwen3_coder"):
            tool_format(name)


TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FUNCTIONS.items()]
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_grammar_where_a_call_is_promised_and_none_elsewhere(name: str) -> None:
    parser = tool_format(name)
    assert tool_grammar(TOOLS, "auto", True, parser) is None
    assert tool_grammar(TOOLS, "none", True, parser) is None
    required, named = tool_grammar(TOOLS, "required", True, parser), tool_grammar(TOOLS, NAMED, True, parser)
    assert required is not None
    assert named is not None
    assert "get" in json.dumps(required)
    assert "get" not in json.dumps(named)
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]  # type: ignore[operator]
    assert tool_grammar(strict, "auto", True, parser) not in (None, required)
