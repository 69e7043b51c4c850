"""The official client, unmodified, against a live server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from forerun.server.settings import ServerSettings
from tests.server.fake_engine import answer_text
from tests.server.live import LiveServer

TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_server() -> Iterator[LiveServer]:
    settings = ServerSettings(model="fake", tool_call_parser="hermes", enable_auto_tool_choice=True)
    with LiveServer(settings) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        max_completion_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    assert choice.message.content == answer_text(12)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_an_answer_can_be_sent_back_as_a_message(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=3)
    history = [
        {"role": "user", "content": "hello"},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "go on"},
    ]
    second = client.chat.completions.create(model="fake", messages=history, max_tokens=3)  # type: ignore[arg-type]
    assert second.choices[0].message.content == answer_text(3)


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer_text(12)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_several_choices_of_a_chat_stream(client: openai.OpenAI) -> None:
    texts, reasons = ["", "", ""], []
    for chunk in client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=12, n=3, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [answer_text(12)] * 3
    assert reasons == ["length"] * 3


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=["a", "b"], max_tokens=4, logprobs=1, extra_body={"top_k": 5}
    )
    assert [c.text for c in answer.choices] == [answer_text(4)] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == list(answer_text(4))
    chunks = client.completions.create(model="fake", prompt="a", max_tokens=4, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == answer_text(4)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    with pytest.raises(openai.APIError, match="could not go on"):
        list(client.completions.create(model="fake", prompt="!fail", max_tokens=50, stream=True))


def test_many_async_streams_with_mixed_parameters_each_get_their_own_text(server: LiveServer) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        if number % 3 == 0:
            answer = await client.completions.create(model="fake", prompt="a", max_tokens=1 + number)
            return answer.choices[0].text
        text = ""
        async with await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=1 + number,
            stream=True,
            temperature=number / 40,
            seed=number,
        ) as chunks:
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
        return text

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    assert asyncio.run(main()) == [answer_text(1 + number) for number in range(32)]


def test_tools_whole_streamed_and_async(tool_server: LiveServer) -> None:
    messages: Any = [{"role": "user", "content": f"!say {CALL}"}]
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="fake", messages=messages, tools=[TOOL]).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls is not None
        (call,) = answer.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "!say It is sunny."}
        history = [*messages, answer.message.model_dump(), result]
        final = client.chat.completions.create(model="fake", messages=history, tools=[TOOL])
        assert final.choices[0].message.content == "It is sunny."
        with client.chat.completions.stream(model="fake", messages=messages, tools=[TOOL]) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls is not None
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments

    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
            response = await client.responses.create(model="fake", input="!say Hello.")
            async for event in await client.responses.create(model="fake", input="!say Hello.", stream=True):
                if event.type == "response.completed":
                    assert event.response.output_text == response.output_text
            return response.output_text

    assert asyncio.run(main()) == "Hello."
