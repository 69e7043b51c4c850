"""32 streaming clients with mixed parameters get, each, the text that they get alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.tiny_engine import NGRAM, SUFFIX

NUM_CLIENTS = 32
TOPICS = ("rivers", "tea", "the sea", "trains", "bread", "maps", "winter", "glass")


def mixed_requests(max_tokens: int) -> list[dict[str, Any]]:
    """Chats that repeat and chats that do not; greedy and seeded, with stops, filters, logprobs, other lengths."""
    requests = []
    for place in range(NUM_CLIENTS):
        topic = TOPICS[place % len(TOPICS)]
        text = f"Repeat this: {topic} and {topic}, {topic} and {topic}. " * (1 + place % 3)
        request: dict[str, Any] = {
            "messages": [{"role": "user", "content": text + f"Number {place}."}],
            "max_tokens": max_tokens - place % 7,
            "extra_body": {"ignore_eos": place % 2 == 0},
        }
        kinds: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1.0, "seed": place},
            {"temperature": 0.7, "top_p": 0.9, "seed": place},
            {"temperature": 0, "stop": ["e", "zz"]},
            {"temperature": 1.2, "seed": place, "logprobs": True, "top_logprobs": 2},
        ]
        requests.append(request | kinds[place % len(kinds)])
    return requests


async def stream(client: openai.AsyncOpenAI, model: str, request: dict[str, Any]) -> tuple[str, str, int, list[float]]:
    """(text, finish reason, completion tokens, log-probabilities)."""
    text, reason, usage = "", "", 0
    logprobs: list[float] = []
    events = await client.chat.completions.create(
        model=model, stream=True, stream_options={"include_usage": True}, **request
    )
    async for event in events:
        if event.usage is not None:
            usage = event.usage.completion_tokens
        for choice in event.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            if choice.logprobs is not None and choice.logprobs.content:
                logprobs += [entry.logprob for entry in choice.logprobs.content]
    return text, reason, usage, logprobs


async def alone_and_together(url: str, requests: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=1200, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        alone = [await stream(client, model, request) for request in requests]
        together = await asyncio.gather(*(stream(client, model, request) for request in requests))
    return alone, list(together)


@contextlib.contextmanager
def served(model: str, *flags: str, patience_s: float = 60) -> Iterator[str]:
    """`forerun serve MODEL` in a process of its own, as a user would start it; ends with SIGINT and exit code 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun", "serve", model, "--host", "127.0.0.1", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    log: list[str] = []
    try:
        assert process.stderr is not None
        deadline = time.monotonic() + patience_s
        url = ""
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                url = found.group()
            if "Application startup complete" in line:
                break
            assert time.monotonic() < deadline, "".join(log)
        assert url, "".join(log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=30)
    assert process.returncode == 0, "".join(log) + rest
    assert "Traceback" not in rest, rest


def assert_same_texts(url: str, max_tokens: int) -> None:
    alone, together = asyncio.run(alone_and_together(url, mixed_requests(max_tokens)))
    for place, (expected, got) in enumerate(zip(alone, together, strict=True)):
        assert got == expected, f"client {place} got another text in company"
    assert len({text for text, *_ in alone}) > NUM_CLIENTS // 2
    metrics = httpx.get(f"{url}/metrics").text
    drafted = re.search(r"vllm:spec_decode_num_draft_tokens_total{.*} (\S+)", metrics)
    assert drafted is not None
    assert float(drafted.group(1)) > 0
    running = re.search(r"vllm:num_requests_running{.*} (\S+)", metrics)
    assert running is not None
    assert float(running.group(1)) == 0


@pytest.mark.parametrize("spec", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_tiny_model(tiny_model: Path, spec: dict[str, Any]) -> None:
    flags = ["--speculative-config", json.dumps(spec), "--kv-cache-memory", "8MiB", "--num-threads", "1"]
    with served(str(tiny_model), *flags) as url:
        assert_same_texts(url, max_tokens=24)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("spec", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_smollm2(spec: dict[str, Any]) -> None:
    flags = ["--speculative-config", json.dumps(spec), "--kv-cache-memory", "2GiB"]
    with served("smollm2-135m", *flags, patience_s=600) as url:
        assert_same_texts(url, max_tokens=48)
