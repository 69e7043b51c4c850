"""What the server knows of the model's reasoning and tool calls, and the messages that it reads from texts."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.engine.messages import RequestOutput
from forerun.errors import RequestError
from forerun.parsers.formats import ReasoningFormat
from forerun.parsers.message import MessageParser
from forerun.parsers.pieces import CallArguments, CallBroken, CallStart, Content, Piece
from forerun.parsers.tools import Functions, ToolFormat, functions_of, tool_grammar
from forerun.server.fields import shorten
from forerun.server.prompts import Tokenizer
from forerun.server.settings import ServerSettings


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools come to.

    Attributes:
        shown: the tools as the template gets them; None: it gets none.
        format: how calls are written; None: nothing is taken for a call.
        functions: those that may be called.
        parallel: more than one call may be made; else what comes after the first is left out.
        form: vLLM's `structured_outputs` without which the choice's promise is not kept; None: it promises nothing.
    """

    shown: list[dict[str, Any]] | None = None
    format: ToolFormat | None = None
    functions: Functions = field(default_factory=dict)
    parallel: bool = True
    form: dict[str, Any] | None = None


def judge_tools(settings: ServerSettings, tools: list[dict[str, Any]], choice: Any, parallel: bool) -> ToolUse:
    """
    Raises:
        RequestError: a choice that names no tool, or tools that this server cannot look for.
    """
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"tools holds two functions of the name {twice!r}", "tools")
    choice = _judge_choice(choice, names)
    if choice == "none":
        return ToolUse(None if settings.exclude_tools_when_tool_choice_none or not tools else tools)
    format = settings.tools
    if format is None or (choice == "auto" and not settings.enable_auto_tool_choice):
        raise RequestError(
            "tools need a server that was started with --enable-auto-tool-choice and --tool-call-parser: leave them "
            "out, or send tool_choice='none'",
            "tools",
        )
    return ToolUse(tools, format, functions_of(tools), parallel, tool_grammar(tools, choice, parallel, format))


def _judge_choice(choice: Any, names: list[str]) -> str | Mapping[str, Any]:
    if choice is None:
        return "auto" if names else "none"
    if choice in ("none", "auto", "required"):
        if not names and choice == "required":
            raise RequestError("tool_choice='required' needs tools", "tool_choice")
        return str(choice) if names else "none"
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            if name in names:
                return {"type": "function", "function": {"name": name}}
            raise RequestError(f"tool_choice names {shorten(name)}, which is none of the tools", "tool_choice")
    raise RequestError(
        "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}, got "
        f"{shorten(choice)}",
        "tool_choice",
    )


class Parsing:
    """What is the same for all requests.

    Args:
        settings: which formats the model was started with.
    """

    def __init__(self, settings: ServerSettings, tokenizer: Tokenizer) -> None:
        self._reasoning = settings.reasoning
        self._tokenizer = tokenizer
        reasoning_tags = () if self._reasoning is None else (self._reasoning.start, self._reasoning.end)
        self._hides_reasoning = self._hides(reasoning_tags)
        self._hides_calls = self._hides(() if settings.tools is None else settings.tools.tags)

    def _hides(self, tags: Iterable[str]) -> bool:
        """Whether these are special tokens, which a text leaves out."""
        encode, decode = self._tokenizer.encode, self._tokenizer.decode
        return any(tag not in decode(encode(f"a{tag}", add_special_tokens=False)) for tag in tags)

    def skips_special_tokens(self, tools: ToolUse) -> bool:
        """Whether special tokens can be left out of a text that is to be parsed."""
        return not (self._hides_reasoning or (tools.format is not None and self._hides_calls))

    def message(self, prompt: list[int], tools: ToolUse, skips_special_tokens: bool) -> MessageState:
        """For the text that follows this prompt."""
        reasoning = self._reasoning
        if reasoning is not None and not reasoning.begins_inside_after(prompt, self._tokenizer):
            reasoning = None
        return MessageState(reasoning, tools, self._tokenizer, skips_special_tokens)

    @property
    def counts_reasoning(self) -> bool:
        return self._reasoning is not None


@dataclass(slots=True)
class ToolCall:
    name: str
    arguments: str = ""
    broken: bool = False  # it never became whole
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class MessageState:
    """The message of one choice, as its outputs come.

    Attributes:
        begun: all calls, those that broke off included: what a stream has shown.
        num_reasoning_tokens: tokens that carry reasoning, tags not counted.
    """

    def __init__(
        self, reasoning: ReasoningFormat | None, tools: ToolUse, tokenizer: Tokenizer, skips_special_tokens: bool
    ) -> None:
        self.begun: list[ToolCall] = []
        self.num_reasoning_tokens = 0
        plain = reasoning is None and tools.format is None
        self._parser = None if plain else MessageParser(reasoning, tools.format, tools.functions)
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens
        self._most_calls = None if tools.parallel else 1
        self._dropping = False  # a call too many
        self._tokens: list[int] = []  # until the reasoning has ended
        self._reasons = reasoning is not None

    @property
    def calls(self) -> list[ToolCall]:
        return [call for call in self.begun if not call.broken]

    def push(self, output: RequestOutput) -> list[Piece]:
        """What the output adds."""
        if self._parser is None:
            return [Content(output.text)] if output.text else []
        pieces = self._parser.push(output.text)
        if output.finish_reason is not None:
            pieces += self._parser.finish()
        if self._reasons:
            self._count(output.token_ids, self._parser.reasoning_span, output.finish_reason is not None)
        return [piece for piece in pieces if self._keeps(piece)]

    def _keeps(self, piece: Piece) -> bool:
        """Takes note of calls; False for a part of a call too many."""
        if isinstance(piece, CallStart):
            self._dropping = self._most_calls is not None and len(self.calls) >= self._most_calls
            if not self._dropping:
                self.begun.append(ToolCall(piece.name))
        if not isinstance(piece, CallStart | CallArguments | CallBroken):
            return True
        if isinstance(piece, CallArguments) and not self._dropping:
            self.begun[-1].arguments += piece.text
        elif isinstance(piece, CallBroken) and not self._dropping:
            self.begun[-1].broken = True
        return not self._dropping

    def _count(self, token_ids: list[int], span: tuple[int, int | None], last: bool) -> None:
        self._tokens += token_ids
        begin, end = span
        if end is None and not last:
            self.num_reasoning_tokens = len(self._tokens)
            return
        self._reasons, place, count = False, 0, 0
        for token_id in self._tokens:
            if self._skips_special_tokens and self._tokenizer.is_special(token_id):
                continue
            size = len(self._tokenizer.token_bytes(token_id))
            count += (end is None or place < end) and place + size > begin
            place += size
        self.num_reasoning_tokens = count
