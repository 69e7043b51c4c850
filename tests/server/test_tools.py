"""Reasoning and tool calls in chat: the fake engine says what the prompt tells it to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forerun.errors import ConfigError, RequestError
from forerun.server.conversation import chat_prompt
from forerun.server.prompts import Limits
from forerun.server.settings import ServerSettings
from tests.server.fake_engine import ByteTokenizer, fake_factory
from tests.server.live import LiveServer
from tests.server.test_answers import CHAT, post, stream
from tests.server.test_bad_input import refused

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "time"}},
]
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    settings = ServerSettings(
        model="fake",
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        enable_force_include_usage=True,
    )
    with LiveServer(settings, fake_factory(step_s=0.0005)) as live, live.http() as client:
        yield client


def say(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is `text`; reasoning is closed by the prompt unless `text` closes it."""
    if "</think>" not in text:
        fields |= {"chat_template_kwargs": {"enable_thinking": False}}
    return {"messages": [{"role": "user", "content": f"!say {text}"}]} | fields


def joined(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """The message that a stream adds up to, as clients add it, and its finish reason."""
    message: dict[str, Any] = {}
    reason = None
    calls: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        reason = choice["finish_reason"] or reason
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
        for call in choice["delta"].get("tool_calls", []):
            if call["index"] not in calls:
                assert call["id"].startswith("call_")
                calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return message | {"calls": [(c["name"], json.loads(c["arguments"])) for c in calls.values()]}, reason


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "reason"),
    [
        ("<think>Why?</think>Because.", "Why?", "Because.", [], "stop"),
        (f"hm</think>\n\nWell:\n{PARIS}\n{ROME}", "hm", "\n\nWell:", ["Paris", "Rome"], "tool_calls"),
        (PARIS, "", None, ["Paris"], "tool_calls"),
        ("<tool_call>{oops</tool_call>", "", "<tool_call>{oops</tool_call>", [], "stop"),
    ],
)
def test_a_message_whole_and_streamed(
    http: httpx.Client, text: str, reasoning: str, content: str | None, calls: list[str], reason: str
) -> None:
    (choice,) = post(http, CHAT, **say(text, tools=TOOLS))["choices"]
    message, wanted = choice["message"], [("weather", {"city": city}) for city in calls]
    found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    assert (message["content"], found, choice["finish_reason"]) == (content, wanted, reason)
    assert message.get("reasoning", "") == message.get("reasoning_content", "") == reasoning
    chunks = stream(http, CHAT, **say(text, tools=TOOLS))
    streamed, streamed_reason = joined(chunks)
    assert streamed["content"] == (content or "")
    assert (streamed["calls"], streamed_reason) == (wanted, reason)
    assert streamed.get("reasoning", "") == streamed.get("reasoning_content", "") == reasoning


def test_a_call_cut_off_by_max_tokens_is_content_in_one_piece_and_a_call_begun_in_a_stream(http: httpx.Client) -> None:
    asked = say(PARIS, tools=TOOLS, max_tokens=50)
    (choice,) = post(http, CHAT, **asked)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (PARIS[:50], "length")
    deltas = [c["choices"][0]["delta"] for c in stream(http, CHAT, **asked) if c["choices"]]
    arguments = "".join(call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", []))
    assert PARIS[:50].endswith(arguments)


def test_reasoning_may_be_left_out_and_its_tokens_are_counted(http: httpx.Client) -> None:
    answer = post(http, CHAT, **say("<think>four</think>x", include_reasoning=False))
    assert "reasoning" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}  # a token a byte; tags are none
    last = stream(http, CHAT, **say("<think>four</think>x"))[-1]  # usage is forced on
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert last["usage"]["completion_tokens"] == len("<think>four</think>x")
    answer = post(http, CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=9)
    assert answer["choices"][0]["message"]["reasoning"] == "abcdefghi"
    assert answer["choices"][0]["message"]["content"] is None
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}
    assert post(http, CHAT, **say("x"))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_several_choices_and_one_call_where_one_is_allowed(http: httpx.Client) -> None:
    choices = post(http, CHAT, **say(f"{PARIS}{ROME}", tools=TOOLS, parallel_tool_calls=False, n=2))["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2
    message, _ = joined(stream(http, CHAT, **say(f"{PARIS}{ROME}", tools=TOOLS, parallel_tool_calls=False)))
    assert message["calls"] == [("weather", {"city": "Paris"})]


def test_tools_and_their_results_reach_the_template(http: httpx.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "how is it?"},
        {"role": "assistant", "content": None, "reasoning": "ask", "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    answer = post(http, CHAT, messages=messages, tools=TOOLS, max_tokens=1, return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]).decode() == (
        "weather+time|tools\nbe brief|system\nhow is it?|user\nask" + "weather{'city': 'Rome'}|assistant\n"
        "sunny|tool\nassistant:"
    )
    answer = post(http, CHAT, **say(PARIS, tools=TOOLS, tool_choice="none", return_token_ids=True))
    assert answer["choices"][0]["message"]["content"] == PARIS
    assert bytes(answer["prompt_token_ids"]).startswith(b"weather+time|tools\n")


def test_an_effort_is_told_to_the_template_where_it_listens(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "!say x"}]
    answer = post(http, CHAT, messages=messages, reasoning_effort="none")
    assert answer["choices"][0]["message"]["content"] == "x"
    assert refused(http, CHAT, say("x", reasoning_effort="high"))["param"] == "reasoning_effort"


def test_parsers_are_judged_at_the_start() -> None:
    for wrong in (
        {"reasoning_parser": "nobody"},
        {"tool_call_parser": "nobody"},
        {"enable_auto_tool_choice": True},
    ):
        with pytest.raises(ConfigError):
            ServerSettings(model="m", **wrong)  # type: ignore[arg-type]


def test_a_template_that_has_no_place_for_tools_refuses_them() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.template_words = frozenset()
    limits = Limits(max_model_len=512, max_prompts=1, max_messages=9, max_text_bytes=9999)
    asked = chat_prompt(
        tokenizer,
        [{"role": "user", "content": "hi"}],
        limits=limits,
        add_generation_prompt=True,
        continue_final_message=False,
        template_kwargs={},
        tools=TOOLS,
    )
    with pytest.raises(RequestError, match="no place for tools"):
        asyncio.run(asked)
