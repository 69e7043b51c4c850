"""`/v1/responses`: a chat in another form. Its body is turned into a chat's, and its message into items."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from forerun.engine.messages import RequestOutput
from forerun.errors import RequestError
from forerun.request import FinishReason
from forerun.server.answers import Answer
from forerun.server.errors import error_response, json_response
from forerun.server.fields import CHAT_NOT_SERVED, COMPLETION_NOT_SERVED, Neutral
from forerun.server.generate import chat_job, read_json, respond
from forerun.server.job import Job, choice_metrics
from forerun.server.models import MAX_TOOLS, Body, ChatBody, FunctionDefinition, GenerationBody
from forerun.server.openapi import describe_body
from forerun.server.parsing import MessageState
from forerun.server.response_items import Event, Item, OutputItems, input_items, messages_of
from forerun.server.state import ServerState, state_of

router = APIRouter()

RENAMED = {  # a chat's fields -> those that they come from
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class _ToolType(BaseModel):
    type: Literal["function"]


class ResponsesTool(FunctionDefinition, _ToolType):  # the type is judged first
    pass


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # reasoning is given as it is: nothing to sum up


class TextOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(Body):
    """POST /v1/responses: what differs from a chat's fields. Sampling fields that are not here are a chat's own."""

    NOT_SERVED: ClassVar[Mapping[str, Neutral]] = {
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "max_tool_calls": (),
        "conversation": (),
        "prompt": (),
        "context_management": (),
        "moderation": (),
    }

    model: str | None = None
    input: Annotated[str | list[Any], Field(description="text, or a list of items")]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True, default_factory=list)]
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    store: bool | None = None
    previous_response_id: Annotated[str | None, Field(max_length=512)] = None

    def chat_fields(self) -> dict[str, Any]:
        """The fields of a chat that mean the same, its messages aside."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream,
            "tools": [_chat_tool(tool) for tool in self.tools],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": self.text and _chat_format(self.text.format),
        }
        return {name: value for name, value in fields.items() if value is not None}


OWN = ResponsesBody.model_fields.keys() | ResponsesBody.NOT_SERVED.keys()
CHAT_OWN = {"n", "best_of", "return_token_ids", "stream_options", "logprobs", "response_format", "request_id"}
CHAT_OWN |= {"use_beam_search", "length_penalty", "early_stopping", "prompt_logprobs", "logprob_token_ids"}
SHARED = (GenerationBody.model_fields.keys() | (CHAT_NOT_SERVED.keys() & COMPLETION_NOT_SERVED.keys())) - OWN - CHAT_OWN
SHARED |= {"chat_template_kwargs"}


def _chat_tool(tool: ResponsesTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.keys() == {"type", "name"}:
        return {"type": choice["type"], "function": {"name": choice["name"]}}
    return choice


def _chat_format(format: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as a chat's `response_format`, which has the schema in an object of its own."""
    if format is None or format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {key: value for key, value in format.items() if key != "type"}}


@router.post("/v1/responses", openapi_extra=describe_body(ResponsesBody))
async def create_response(request: Request) -> Response:
    state = state_of(request)
    content = await read_json(request)
    body = ResponsesBody.read({name: value for name, value in content.items() if name not in SHARED})
    stores = body.store if body.store is not None else state.responses.max_bytes > 0
    if stores and state.responses.max_bytes == 0:
        raise RequestError("store=true is not served: this server was started to keep no responses", "store")
    before = _items_before(state, body.previous_response_id)
    items = [*before, *input_items(body.input)]
    messages, sources = messages_of(items, len(before))
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
        sources.insert(0, "instructions")
    shared = {name: value for name, value in content.items() if name in SHARED}
    try:
        chat = ChatBody.read(shared | body.chat_fields() | {"messages": messages})
        job, (message,) = await chat_job(request, state, chat, "resp")
    except RequestError as error:
        raise RequestError(_renamed(str(error), sources), _renamed(error.param or "", sources) or None) from None
    return await respond(request, state, ResponsesAnswer(state, job, message, body, items if stores else None))


def _items_before(state: ServerState, response_id: str | None) -> list[Item]:
    if response_id is None:
        return []
    stored = state.responses.get(response_id)
    if stored is None:
        raise RequestError(
            "previous_response_id names no response that is kept here: send the conversation as input instead",
            "previous_response_id",
        )
    return stored.items


def _renamed(text: str, sources: list[str]) -> str:
    """A message about a chat's fields, as one about those that the user sent."""
    text = re.sub(r"messages\[(\d+)\]", lambda found: sources[int(found[1])], text)
    return re.sub(rf"\b({'|'.join(RENAMED)})\b", lambda found: RENAMED[found[1]], text)


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    if "stream" in request.query_params and request.query_params["stream"] != "false":
        raise RequestError("stream=true is not served for a response that is kept: leave it out", "stream")
    stored = state_of(request).responses.get(response_id)
    return _unknown() if stored is None else json_response(stored.response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    if not state_of(request).responses.drop(response_id):
        return _unknown()
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    if state_of(request).responses.get(response_id) is None:
        return _unknown()
    message = "only a response with background=true, which is not served, can be cancelled; to end another, close its "
    return error_response(400, message + "connection", "response_id")


def _unknown() -> Response:
    return error_response(404, "no response of this id is kept here", "response_id")


class ResponsesAnswer(Answer):
    """
    Args:
        conversation: the items that it answers, if the response is to be kept; None: it is not.
    """

    done = b""

    def __init__(
        self, state: ServerState, job: Job, message: MessageState, body: ResponsesBody, conversation: list[Item] | None
    ) -> None:
        super().__init__(job)
        self._id = f"resp_{uuid.uuid4().hex}"  # never the user's: who knows it may read the response
        self._state = state
        self._message = message
        self._body = body
        self._conversation = conversation
        self._output = OutputItems(message, streams=body.stream)
        self._sequence_number = -1

    def take(self, index: int, output: RequestOutput) -> None:
        self.events(index, output)

    def whole(self) -> dict[str, Any]:
        self.closing()
        return self._response(self._status())

    def opening(self) -> list[Event]:
        response = self._response("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def events(self, index: int, output: RequestOutput) -> list[Event]:
        self.job.choices[index].count(output)
        return [event for piece in self._message.push(output) for event in self._output.add(piece)]

    def closing(self) -> list[Event]:
        status = self._status()
        closed = self._output.close(status)
        response = self._response(status)
        if self._conversation is not None:
            self._state.responses.put(response, [*self._conversation, *self._output.items])
        return [*closed, {"type": f"response.{status}", "response": response}]

    def encode(self, event: Event) -> bytes:
        self._sequence_number += 1
        event = {"type": "error", **event, "sequence_number": self._sequence_number}
        return f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"

    def _status(self) -> str:
        return "incomplete" if self.job.choices[0].finish_reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body, chat, (choice,) = self._body, self.job.body, self.job.choices
        response: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self.job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": chat.metadata,
            "model": self.job.model,
            "output": [dict(item) for item in self._output.items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "seed": choice.request.seed,
            "service_tier": "default",
            "store": self._conversation is not None,
            "temperature": chat.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [
                {"description": None, "parameters": None, "strict": False, **t.model_dump(exclude_none=True)}
                for t in body.tools
            ],
            "top_p": chat.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": chat.user,
        }
        metrics = choice_metrics(choice, self._state.settings)
        return response | ({} if metrics is None else {"metrics": metrics})

    def _usage(self) -> dict[str, Any]:
        usage = self.job.usage(details=True)
        shown = self._state.settings.enable_prompt_tokens_details
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] if shown else {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._message.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
