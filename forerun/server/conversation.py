"""From the messages of a chat to token ids, by the model's template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.errors import RequestError
from forerun.server.fields import MESSAGE_NOT_SERVED, served_fields, shorten
from forerun.server.prompts import Limits, Tokenizer, offload

RESERVED_KWARGS = frozenset(
    {"self", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template"}
)
TEXT_PARTS = ("text", "input_text", "output_text")  # the latter two in `/v1/responses`
ROLES_FIELDS = {
    "assistant": ("role", "content", "name", "tool_calls", "reasoning", "reasoning_content"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
OTHER_FIELDS = ("role", "content", "name")


async def chat_prompt(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    limits: Limits,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a conversation, by the model's chat template.

    Raises:
        RequestError: no template, a malformed message, more than the limits allow, or the template refuses.
    """
    if not tokenizer.has_chat_template:
        raise RequestError("messages: this model has no chat template; use /v1/completions", "messages")
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message=true needs add_generation_prompt=false: the last message is either gone on with or "
            "answered",
            "continue_final_message",
        )
    if tools and "tools" not in tokenizer.template_words:
        raise RequestError("tools: this model's chat template has no place for tools", "tools")
    _check_kwargs(template_kwargs, tokenizer)
    _check_number(messages, limits.max_messages)
    clean = [_message(index, message, tokenizer) for index, message in enumerate(messages)]
    size = limits.check_sizes(tokenizer, _texts(clean, template_kwargs, tools), "messages")

    def apply() -> list[int]:
        return tokenizer.apply_chat_template(
            clean,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **template_kwargs,
        )

    try:
        return await offload(size, apply)
    except RequestError as error:
        raise RequestError(str(error), error.param or "messages") from None


def effort_kwargs(effort: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a template is told of `reasoning_effort`.

    Raises:
        RequestError: it cannot be told.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in tokenizer.template_words:
        return {"reasoning_effort": effort}
    if effort == "none":
        return {"enable_thinking": False} if "enable_thinking" in tokenizer.template_words else {}
    raise RequestError(
        f"reasoning_effort={shorten(effort)} is not served: this model's chat template does not take it; leave it out "
        "or send 'none'",
        "reasoning_effort",
    )


def _check_kwargs(kwargs: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    if taken := RESERVED_KWARGS & kwargs.keys():
        raise RequestError(f"chat_template_kwargs must not hold {sorted(taken)[0]!r}", "chat_template_kwargs")
    if unknown := sorted(kwargs.keys() - tokenizer.template_words):
        raise RequestError(
            f"chat_template_kwargs holds {shorten(unknown[0])}, which this model's chat template does not read",
            "chat_template_kwargs",
        )


def _texts(messages: list[dict[str, Any]], *settings: Any) -> list[str]:
    """The contents of all messages, and whatever else a template may write into the text."""
    others = [{key: value for key, value in message.items() if key not in ("role", "content")} for message in messages]
    contents = "".join(message["content"] or "" for message in messages)
    return [contents, *(json.dumps(other, ensure_ascii=False) for other in (*others, *settings) if other)]


def _check_number(messages: list[dict[str, Any]], most: int) -> None:
    """Text parts and tool calls count as messages: a conversation of one message may hold as many."""
    lists = (message.get(key) for message in messages for key in ("content", "tool_calls"))
    number = len(messages) + sum(len(items) for items in lists if isinstance(items, list))
    if number > most:
        raise RequestError(f"messages holds {number} messages and text parts, at most {most} are accepted", "messages")


def _message(index: int, message: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    where = f"messages[{index}]."
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}role must be a name such as 'user', got {shorten(role)}", f"{where}role")
    if role == "function":
        raise RequestError(f"{where}role='function' is not served: send role='tool'", f"{where}role")
    message = served_fields(message, ROLES_FIELDS.get(role, OTHER_FIELDS), MESSAGE_NOT_SERVED, where)
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(message.get(name, ""), str):
            raise RequestError(f"{where}{name} must be a string", f"{where}{name}")
    if role == "developer" and role not in tokenizer.template_words:
        message["role"] = "system"  # its older name
    if reasoning := message.pop("reasoning", None) or message.get("reasoning_content"):
        message["reasoning_content"] = message["reasoning"] = reasoning  # templates know it by either name
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(f"{where}tool_calls", message["tool_calls"])
        if not message["tool_calls"]:
            del message["tool_calls"]
    if message.get("content") is None and ("tool_calls" in message or reasoning):
        return message | {"content": None}
    return message | {"content": _content(f"{where}content", message.get("content"))}


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Calls of an earlier answer, with their arguments as objects, which is how templates take them."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list of tool calls, got {shorten(calls)}", where)
    return [_tool_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with a function and its name, got {shorten(call)}", where)
    if call.get("type", "function") != "function":
        raise RequestError(f"{where}.type must be 'function', got {shorten(call['type'])}", where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        got = shorten(function["arguments"])
        raise RequestError(f"{where}.function.arguments must be a JSON object as text, got {got}", where)
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return identity | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _content(where: str, content: Any) -> str:
    """Text, or a list of text parts, which are joined by newlines as vLLM joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where} must be text or a list of text parts, got {shorten(content)}", where)
    return "\n".join(_text_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _text_part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where} must be an object with a type, got {shorten(part)}", where)
    if part["type"] != "text":
        raise RequestError(f"{where}.type={shorten(part['type'])} is not served: this server takes text only", where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text must be a string, got {shorten(part.get('text'))}", where)
    if unknown := part.keys() - {"type", "text"}:
        raise RequestError(f"unknown field {f'{where}.{min(unknown)[:100]}'!r}", where)
    return str(part["text"])
