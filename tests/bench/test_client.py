"""What the client takes down of one request: times by their definitions, and everything that can go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from forerun.bench.client import Outcome, Target, ask, events
from forerun.bench.datasets import Sample
from forerun.errors import ConfigError

CHAT = Target(base_url="http://server", endpoint="/v1/chat/completions", backend="openai-chat", model="m")
TEXT = Target(base_url="http://server", endpoint="/v1/completions", backend="vllm", model="m", body={"temperature": 0})
SAMPLE = Sample("hello", 7, "qa")


def delta(text: str | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    content = fields | ({} if text is None else {"content": text})
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def usage(num_prompt: int, num_output: int, **fields: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output}, **fields}


def taken(timed: Sequence[tuple[float, dict[str, Any]]]) -> Outcome:
    outcome = Outcome(SAMPLE)
    for elapsed_s, event in timed:
        outcome.take(event, elapsed_s)
    return outcome


def asked(answer: Callable[[httpx.Request], httpx.Response], target: Target = CHAT) -> Outcome:
    async def work() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=target.base_url) as http:
            return await ask(http, target, SAMPLE, 3)

    return asyncio.run(work())


def stream(*lines: object) -> httpx.Response:
    text = "".join(f"data: {line if isinstance(line, str) else json.dumps(line)}\n\n" for line in lines)
    return httpx.Response(200, content=text.encode())


def test_times_follow_their_definitions() -> None:
    """First text at 0.3 s, chunks at 0.4 and 0.6 s, 7 tokens: the role's chunk is no token, several come in one."""
    outcome = taken(
        [
            (0.1, delta("", role="assistant")),
            (0.3, delta("a")),
            (0.4, delta("bcd")),
            (0.6, delta(finish="length")),
            (0.9, usage(11, 7)),
        ]
    )
    assert outcome.ttft_s == 0.3
    assert outcome.itls_s == pytest.approx([0.1, 0.2])
    assert outcome.latency_s == 0.6
    assert outcome.tpot_s == pytest.approx((0.6 - 0.3) / (7 - 1))
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.text) == (11, 7, "abcd")
    assert outcome.ok


def test_one_token_has_no_time_per_output_token() -> None:
    assert taken([(0.2, delta("a", "stop")), (0.2, usage(1, 1))]).tpot_s is None


def test_an_answer_without_text_has_no_first_token_but_an_end() -> None:
    outcome = taken([(0.2, delta(finish="stop")), (0.2, usage(1, 1))])
    assert outcome.ttft_s is None
    assert outcome.ok
    assert outcome.latency_s == 0.2


@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content"])
def test_thoughts_are_text(field: str) -> None:
    assert taken([(0.5, delta(**{field: "hm"}))]).ttft_s == 0.5


def test_arguments_of_a_tool_call_are_text() -> None:
    call = {"function": {"name": "f", "arguments": '{"a'}}
    assert taken([(0.5, delta(tool_calls=[call]))]).text == 'f{"a'


def test_completions_have_their_text_in_the_choice() -> None:
    outcome = asked(lambda _: stream({"choices": [{"text": "ab", "finish_reason": "stop"}]}, usage(2, 2)), TEXT)
    assert (outcome.ok, outcome.text, outcome.num_output_tokens) == (True, "ab", 2)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    text = b'data: {"a": 1}\r\n\r\n: a comment\n\nevent: x\ndata: two\n\ndata:three'

    async def collect() -> list[bytes]:
        async def cut() -> AsyncIterator[bytes]:
            for place in range(0, len(text), size):
                yield text[place : place + size]

        return [data async for data in events(cut())]

    assert asyncio.run(collect()) == [b'{"a": 1}', b"two", b"three"]


def test_a_chat_request_says_what_was_asked() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, dict(request.headers), json.loads(request.content)))
        return stream(delta("a", "stop"), "[DONE]")

    assert asked(answer).ok
    path, headers, body = seen[0]
    assert path == "/v1/chat/completions"
    assert headers["x-request-id"] == "bench-3"
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 7,
    }


def test_a_completion_request_bears_the_fields_of_every_request() -> None:
    body = json.loads(TEXT.content(Sample([1, 2])))
    assert (body["prompt"], body["temperature"], "max_tokens" in body) == ([1, 2], 0, False)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda _: httpx.Response(400, json={"error": {"message": "too\nlong"}}), "HTTP 400: too long"),
        (lambda _: httpx.Response(502, text="<bad gateway>"), "HTTP 502: <bad gateway>"),
        (lambda _: httpx.Response(500), "HTTP 500: no body"),
        (lambda _: stream(delta("a"), {"error": {"message": "the engine died"}}), "the engine died"),
        (lambda _: stream(delta("a")), "the stream ended before the answer did"),
        (lambda _: stream(delta("a"), "{broken"), "an event that cannot be read"),
        (lambda _: stream("[1]"), "an event that cannot be read"),
    ],
)
def test_what_goes_wrong_stands_in_the_outcome(answer: Callable[[httpx.Request], httpx.Response], error: str) -> None:
    outcome = asked(answer)
    assert not outcome.ok
    assert outcome.error.startswith(error)


def test_a_connection_that_breaks_is_an_error() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset by peer")

    assert asked(answer).error == "ReadError: reset by peer"


def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert CHAT.connect().headers["authorization"] == "Bearer secret"
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "authorization" not in CHAT.connect().headers


@pytest.mark.parametrize(
    ("backend", "endpoint", "words"),
    [
        ("tgi", "/v1/completions", "--backend 'tgi' is not served: use openai, vllm, openai-chat"),
        ("openai-chat", "/v1/completions", "ends in /chat/completions, got '/v1/completions'"),
        ("openai", "/v1/chat/completions", "ends in /completions, got"),
    ],
)
def test_a_target_that_cannot_be_is_refused(backend: str, endpoint: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        Target(base_url="", endpoint=endpoint, backend=backend, model="")
