"""Formats of tool calls: names to formats, and what a request's choice of tools asks of a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ConfigError
from forerun.parsers.formats import tag_pair
from forerun.parsers.tools.deepseek import DeepSeek
from forerun.parsers.tools.format import Functions, ToolFormat
from forerun.parsers.tools.hermes import JsonBetweenTags
from forerun.parsers.tools.llama3 import Llama3Json
from forerun.parsers.tools.qwen import QwenXml

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": JsonBetweenTags(),
    "qwen3_coder": QwenXml(),
    "llama3_json": Llama3Json(),
    "deepseek_v3": DeepSeek(fenced=True),
    "deepseek_v31": DeepSeek(fenced=False),
}


def tool_format(name: str) -> ToolFormat:
    """The format of `--tool-call-parser`: a known name, or JSON between any pair of tags as `tags:START,END`.

    Raises:
        ConfigError: no such name, or a pair that is none.
    """
    if name in TOOL_FORMATS:
        return TOOL_FORMATS[name]
    if (pair := tag_pair(name)) is not None:
        return JsonBetweenTags(*pair)
    known = ", ".join(TOOL_FORMATS)
    raise ConfigError(f"--tool-call-parser={name!r} is not known: use {known}, or a pair of tags, tags:START,END")


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The functions of a request's `tools`, with the schema of their parameters."""
    functions = (tool["function"] for tool in tools)
    return {
        function["name"]: function.get("parameters") or {"type": "object", "properties": {}} for function in functions
    }


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any], parallel: bool, parser: ToolFormat
) -> dict[str, Any] | None:
    """vLLM's `structured_outputs` that make the answer what the request's choice of tools promises, in this format.
    None where nothing is promised: no choice, or a free one among tools none of which is strict.

    Args:
        tools, tool_choice, parallel: the request's fields, judged already.
    """
    if isinstance(tool_choice, Mapping):
        name = tool_choice["function"]["name"]
        chosen = [tool for tool in tools if tool["function"]["name"] == name]
        return parser.grammar(functions_of(chosen), required=True, parallel=False)
    if tool_choice == "required":
        return parser.grammar(functions_of(tools), required=True, parallel=parallel)
    if tool_choice == "auto" and any(tool["function"].get("strict") for tool in tools):
        return parser.grammar(functions_of(tools), required=False, parallel=parallel)
    return None


__all__ = ["TOOL_FORMATS", "Functions", "ToolFormat", "functions_of", "tool_format", "tool_grammar"]
