"""Requests that are large in any way are refused, or served, while everything else goes on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.server.settings import ServerSettings
from tests.server.fake_engine import MAX_MODEL_LEN, fake_factory
from tests.server.live import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_BYTES = 15 * 2**20
STALL_S = 4.0  # tokenising a text in one piece took 8 to 30 s; parsing a body takes one where other tests run beside


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


@pytest.fixture(scope="module")
def real(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """With a real tokenizer, and the limits as they are by default."""
    with LiveServer(factory=fake_factory(), tokenizer=tokenizer) as live:  # type: ignore[arg-type]
        yield live


async def longest_gap(until: asyncio.Event) -> float:
    """In seconds of this process where it had to wait for others."""
    longest, last = 0.0, (time.monotonic(), time.process_time())
    while not until.is_set():
        await asyncio.sleep(0.005)
        now = time.monotonic(), time.process_time()
        longest, last = max(longest, min(b - a for a, b in zip(last, now, strict=True))), now
    return longest


def post_beside_ticker(server: LiveServer, path: str, body: bytes) -> tuple[httpx.Response, float]:
    """The answer, and the longest time for which nothing else was done in the server's loop meanwhile."""
    done = asyncio.Event()
    gap = asyncio.run_coroutine_threadsafe(longest_gap(done), server._loop)
    with server.http() as http:
        response = http.post(path, content=body)
    server._loop.call_soon_threadsafe(done.set)
    return response, gap.result(10)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


TEXT = "the server drafts tokens " * (NUM_BYTES // 25)
LARGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "one text": (COMPLETIONS, {"prompt": TEXT}, "prompt"),
    "one text that is not ASCII": (COMPLETIONS, {"prompt": "é" * (NUM_BYTES // 6)}, "prompt"),
    "texts": (COMPLETIONS, {"prompt": [TEXT[:5000]] * 1000}, "prompt"),
    "short texts": (COMPLETIONS, {"prompt": ["a"] * (NUM_BYTES // 5)}, "prompt"),
    "ids": (COMPLETIONS, {"prompt": [7] * (NUM_BYTES // 3)}, "prompt"),
    "lists of ids": (COMPLETIONS, {"prompt": [[7]] * (NUM_BYTES // 5)}, "body"),
    "fewer lists of ids": (COMPLETIONS, {"prompt": [[7] * 30] * 200_000}, "prompt"),
    "many things that are no prompts": (COMPLETIONS, {"prompt": [True] * (NUM_BYTES // 6)}, "prompt"),
    "one message": (CHAT, {"messages": [user(TEXT)]}, "messages"),
    "messages": (CHAT, {"messages": [user("a")] * 250_000}, "messages"),
    "parts": (CHAT, {"messages": [user([{"type": "text", "text": ""}] * 250_000)]}, "messages"),
    "many things that are no messages": (CHAT, {"messages": [1] * (NUM_BYTES // 3)}, "messages"),
    "words for the template": (
        CHAT,
        {"messages": [user("a")], "chat_template_kwargs": {"x": TEXT}},
        "chat_template_kwargs",
    ),
    "half a character": (COMPLETIONS, {"prompt": TEXT[: NUM_BYTES // 2] + "\ud800"}, "prompt"),
    "text to be counted": ("/tokenize", {"prompt": TEXT}, "prompt"),
    "messages to be counted": ("/tokenize", {"messages": [user(TEXT)]}, "messages"),
    "ids to be read": ("/detokenize", {"tokens": [7] * (NUM_BYTES // 3)}, "tokens"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_what_cannot_fit_is_refused_at_once_and_nobody_waits(real: LiveServer, kind: str) -> None:
    path, content, param = LARGE[kind]
    body = json.dumps(content, separators=(",", ":")).encode()
    response, gap = post_beside_ticker(real, path, body)
    assert response.status_code == 400, response.text[:200]
    error = response.json()["error"]
    assert error["param"].partition("[")[0] == param
    assert len(error["message"]) < 300
    assert gap < STALL_S


def test_the_refusal_names_both_numbers(real: LiveServer, tokenizer: Tokenizer) -> None:
    with real.http() as http:
        for path, content in ((COMPLETIONS, {"prompt": "a" * 100_000}), ("/tokenize", {"prompt": "a" * 100_000})):
            message = http.post(path, json=content).json()["error"]["message"]
            assert "100000" in message
            assert f"{MAX_MODEL_LEN} tokens of at most {tokenizer.max_token_bytes} bytes" in message


def test_the_longest_token_is_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.max_token_bytes == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))


def test_a_text_of_the_most_bytes_is_not_refused_before_it_is_tokenised(real: LiveServer, tokenizer: Tokenizer) -> None:
    longest = max((tokenizer.token_text(i) for i in range(tokenizer.vocab_size)), key=len)
    with real.http() as http:
        answer = http.post("/tokenize", json={"prompt": longest * MAX_MODEL_LEN})
        assert answer.json()["count"] == MAX_MODEL_LEN
        assert http.post("/tokenize", json={"prompt": longest * MAX_MODEL_LEN + "a"}).status_code == 400


def test_the_limits_are_settings() -> None:
    settings = ServerSettings(model="fake", max_prompts=2, max_messages=3, max_text_bytes=100)
    with LiveServer(settings) as server, server.http() as http:
        for path, content, words in (
            (COMPLETIONS, {"prompt": ["a"] * 3}, "3 prompts, at most 2"),
            (COMPLETIONS, {"prompt": ["a" * 51] * 2}, "102 bytes of text or token ids, at most 100"),
            (COMPLETIONS, {"prompt": [[7] * 51] * 2}, "102 bytes of text or token ids, at most 100"),
            (CHAT, {"messages": [user("a")] * 4}, "4 messages and text parts, at most 3"),
            (CHAT, {"messages": [user([{"type": "text", "text": "a"}] * 3)]}, "4 messages and text parts, at most 3"),
            (CHAT, {"messages": [user("a" * 51)] * 2}, "102 bytes of text or token ids, at most 100"),
        ):
            response = http.post(path, json=content)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
        assert http.post(COMPLETIONS, json={"prompt": ["a"] * 2, "max_tokens": 1}).status_code == 200


def test_while_a_long_text_is_tokenised_others_run(tokenizer: Tokenizer) -> None:
    """A model of 128k tokens takes 500 kB of text; all prompts of a request may have 4 MiB."""
    text = TEXT[:2_000_000]

    async def main() -> tuple[float, float]:
        done = asyncio.Event()
        ticker = asyncio.create_task(longest_gap(done))
        await asyncio.sleep(0.02)  # it must tick before the lock is taken
        began = time.process_time()
        await asyncio.to_thread(tokenizer.encode, text)
        seconds = time.process_time() - began
        done.set()
        return seconds, await ticker

    seconds, gap = asyncio.run(main())
    assert gap < seconds / 2
