"""The official client, unmodified, against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.server.fake_engine import answer_text
from tests.server.live import LiveServer


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
