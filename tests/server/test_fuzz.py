"""Bodies that nobody foresaw: an answer or a 4xx that names a field, never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import RequestError
from forerun.server.body import parse_body
from forerun.server.conversation import chat_prompt, effort_kwargs
from forerun.server.errors import error_body, json_response
from forerun.server.fields import CHAT_NOT_SERVED, COMPLETION_NOT_SERVED
from forerun.server.models import ChatBody, CompletionBody, GenerationBody, shown_tools
from forerun.server.parsing import judge_tools
from forerun.server.prompts import Limits, check_prompt, check_token_ids, completion_prompts
from forerun.server.response_items import input_items, messages_of
from forerun.server.responses import ResponsesBody
from forerun.server.settings import ServerSettings
from tests.server.fake_engine import ByteTokenizer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
COMPLETION_FIELDS = st.sampled_from([*CompletionBody.model_fields, *COMPLETION_NOT_SERVED])
CHAT_FIELDS = st.sampled_from([*ChatBody.model_fields, *CHAT_NOT_SERVED])
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "name", "tool_calls", "reasoning"]),
    JSON | st.sampled_from(["user", "assistant", "tool"]),
    max_size=4,
)
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(coroutine: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    return stopped.value.value


TOOLS = ServerSettings(model="fake", tool_call_parser="hermes", enable_auto_tool_choice=True)
LIMITS = Limits(max_model_len=512, max_prompts=16, max_messages=16, max_text_bytes=1024)


def judge(kind: type[GenerationBody], content: dict[str, Any]) -> None:
    """Do what the route does before the engine; only a RequestError that can be shown may come out."""
    try:
        body = kind.read(parse_body(json.dumps(content).encode()))
        check_token_ids(body.stop_token_ids, "stop_token_ids", 256)
        body.sampling()
        for prompt in run(prompts(body)):
            check_prompt(prompt, "prompt", 256, 512)
    except RequestError as error:
        show(error)


def show(error: RequestError) -> None:
    """It names a field, is short, and can be sent."""
    assert error.param is not None
    assert len(str(error)) < 1000
    json_response(error_body(400, str(error), error.param))


async def prompts(body: GenerationBody) -> list[list[int]]:
    if isinstance(body, CompletionBody):
        return await completion_prompts(ByteTokenizer(), body.prompt, body.add_special_tokens, LIMITS)
    assert isinstance(body, ChatBody)
    options = {
        "add_generation_prompt": body.add_generation_prompt,
        "limits": LIMITS,
        "continue_final_message": body.continue_final_message,
    }
    tools = judge_tools(TOOLS, shown_tools(body.tools), body.tool_choice, body.parallel_tool_calls)
    kwargs = effort_kwargs(body.reasoning_effort, ByteTokenizer()) | body.chat_template_kwargs
    return [await chat_prompt(ByteTokenizer(), body.messages, **options, template_kwargs=kwargs, tools=tools.shown)]


@MANY
@given(st.dictionaries(COMPLETION_FIELDS | st.text(max_size=8), JSON, max_size=4), JSON | st.just("hello"))
def test_any_completion_is_read_or_refused(fields: dict[str, Any], prompt: Any) -> None:
    judge(CompletionBody, {"prompt": prompt} | fields)


@MANY
@given(st.dictionaries(CHAT_FIELDS | st.text(max_size=8), JSON, max_size=4), st.lists(MESSAGE, max_size=3) | JSON)
def test_any_chat_is_read_or_refused(fields: dict[str, Any], messages: Any) -> None:
    judge(ChatBody, {"messages": messages} | fields)


RESPONSES_FIELDS = st.sampled_from([*ResponsesBody.model_fields, *ResponsesBody.NOT_SERVED])
ITEM = st.dictionaries(
    st.sampled_from(["type", "role", "content", "call_id", "name", "arguments", "output", "summary"]),
    JSON | st.sampled_from(["user", "message", "function_call", "function_call_output", "reasoning"]),
    max_size=4,
)


@MANY
@given(st.dictionaries(RESPONSES_FIELDS | st.text(max_size=8), JSON, max_size=4), st.lists(ITEM, max_size=3) | JSON)
def test_any_response_is_read_or_refused(fields: dict[str, Any], items: Any) -> None:
    try:
        body = ResponsesBody.read(parse_body(json.dumps({"input": items} | fields).encode()))
        messages, sources = messages_of(input_items(body.input))
        assert len(messages) == len(sources)
    except RequestError as error:
        show(error)
    else:
        judge(ChatBody, {"messages": messages} | body.chat_fields())


@MANY
@given(st.binary(max_size=40) | st.text(st.sampled_from('{}[]":,\\ud8e+-0195.truefalsn '), max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        assert isinstance(parse_body(body), dict)
    except RequestError as error:
        show(error)
