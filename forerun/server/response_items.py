"""The items of `/v1/responses`: from those of a request to messages, and from a message to those of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from forerun.errors import RequestError
from forerun.parsers.pieces import CallArguments, CallBroken, CallStart, Content, Piece, Reasoning
from forerun.server.fields import served_fields, shorten
from forerun.server.parsing import MessageState

Item = dict[str, Any]
Event = dict[str, Any]

_TEXT_PARTS = ("input_text", "output_text", "text")


def input_items(given: str | list[Any]) -> list[Item]:
    """
    Raises:
        RequestError: an item that is none.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise RequestError(f"input[{index}] must be an object, got {shorten(item)}", f"input[{index}]")
    return [{"type": "message", **item} for item in given]


def messages_of(items: Sequence[Item], first: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages that items stand for: reasoning and calls belong to the message of the assistant around them.

    Args:
        first: items before it were judged with an earlier request.
    Returns:
        Messages, and of each, the name of the item that it came from.
    Raises:
        RequestError: an item of a type that is not served, or one that lacks what it must have.
    """
    messages: list[dict[str, Any]] = []
    sources: list[str] = []
    for index, item in enumerate(items):
        where = f"input[{index - first}]" if index >= first else "previous_response_id"
        message = _message(where, item)
        last = messages[-1] if messages else {}
        if message["role"] == "assistant" and last.get("role") == "assistant" and _joins(last, message):
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            last |= message | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(message)
            sources.append(where)
    return messages, sources


def _joins(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Reasoning comes before content and content before calls, in one message."""
    if "reasoning" in message:
        return False
    return "content" not in message or not ("content" in last or "tool_calls" in last)


def _message(where: str, item: Item) -> dict[str, Any]:
    kind = item["type"]
    if kind == "message":
        fields = served_fields(item, ("type", "role", "content", "id", "status"), {"phase": ()}, f"{where}.")
        return {"role": fields.get("role"), "content": _parts(fields.get("content"))}
    if kind == "function_call":
        fields = served_fields(item, ("type", "call_id", "name", "arguments", "id", "status"), {}, f"{where}.")
        call = {"id": fields.get("call_id"), "type": "function"}
        return {
            "role": "assistant",
            "tool_calls": [call | {"function": {k: fields.get(k) for k in ("name", "arguments")}}],
        }
    if kind == "function_call_output":
        fields = served_fields(item, ("type", "call_id", "output", "id", "status"), {}, f"{where}.")
        return {"role": "tool", "tool_call_id": fields.get("call_id"), "content": _parts(fields.get("output"))}
    if kind == "reasoning":
        fields = served_fields(
            item, ("type", "summary", "content", "id", "status"), {"encrypted_content": ()}, f"{where}."
        )
        return {"role": "assistant", "reasoning": _reasoning_text(where, fields)}
    raise RequestError(
        f"{where}.type={shorten(kind)} is not served: send message, function_call, function_call_output or reasoning",
        f"{where}.type",
    )


def _parts(content: Any) -> Any:
    """Text parts under the name that chat has for them; all else as it is, for the chat's own judgement."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]


def _reasoning_text(where: str, fields: dict[str, Any]) -> str:
    parts = fields.get("content") or fields.get("summary") or []
    texts = (
        [part.get("text") if isinstance(part, dict) else None for part in parts] if isinstance(parts, list) else [None]
    )
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"{where}.content must be a list of parts with a text, got {shorten(parts)}", f"{where}.content"
        )
    return "\n".join(map(str, texts))


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputItems:
    """Makes items of a message's pieces, and says by which events a client learns of them.

    Args:
        state: of the message, for the ids of its calls.
        streams: events are sent: what was shown of a call that broke off stays a call, an incomplete one.
    Attributes:
        items: all that were begun; the last may still grow.
    """

    def __init__(self, state: MessageState, *, streams: bool) -> None:
        self.items: list[Item] = []
        self._state = state
        self._streams = streams
        self._open = ""  # the kind of the last item while it grows
        self._num_calls = 0

    def add(self, piece: Piece) -> list[Event]:
        match piece:
            case Reasoning(text):
                return self._text("reasoning", text)
            case Content(text):
                return self._text("message", text)
            case CallStart():
                return [*self.close(), *self._begin_call()]
            case CallArguments(text):
                self.items[-1]["arguments"] += text
                return [self._event("response.function_call_arguments.delta", delta=text)]
            case CallBroken(text, rest):
                if self._streams:
                    return [*self.close("incomplete"), *(self._text("message", rest) if rest else [])]
                self.items.pop()
                self._open = ""
                return self._text("message", text)

    def close(self, status: str = "completed") -> list[Event]:
        """The last item grows no more."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item = self.items[-1]
        item["status"] = status
        if kind == "function_call":
            done = self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            return [done, self._item_event("response.output_item.done")]
        part = item["content"][0]
        return [
            self._event(f"{_TEXT_EVENTS[kind]}.done", content_index=0, text=part["text"], **_LOGPROBS[kind]),
            self._event("response.content_part.done", content_index=0, part=dict(part)),
            self._item_event("response.output_item.done"),
        ]

    def _text(self, kind: str, text: str) -> list[Event]:
        events = [] if self._open == kind else [*self.close(), *self._begin_text(kind)]
        self.items[-1]["content"][0]["text"] += text
        return [*events, self._event(f"{_TEXT_EVENTS[kind]}.delta", content_index=0, delta=text, **_LOGPROBS[kind])]

    def _begin_text(self, kind: str) -> list[Event]:
        if kind == "message":
            item: Item = {
                "id": _new_id("msg"),
                "type": kind,
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": _new_id("rs"), "type": kind, "summary": [], "status": "in_progress", "content": []}
            part = {"type": "reasoning_text", "text": ""}
        self.items.append(item)
        self._open = kind
        added = self._item_event("response.output_item.added")
        item["content"] = [part]
        return [added, self._event("response.content_part.added", content_index=0, part=dict(part))]

    def _begin_call(self) -> list[Event]:
        call = self._state.begun[self._num_calls]
        self._num_calls += 1
        item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call.id}
        self.items.append(item | {"name": call.name, "arguments": ""})
        self._open = "function_call"
        return [self._item_event("response.output_item.added")]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, kind: str) -> Event:
        item = self.items[-1]
        copied = {k: [dict(part) for part in v] if k == "content" else v for k, v in item.items()}
        return {"type": kind, "output_index": len(self.items) - 1, "item": copied}


_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_LOGPROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}
