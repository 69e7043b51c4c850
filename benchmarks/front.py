"""What the HTTP front costs: an engine that computes nothing gives every stream one token a step, as fast as it can.

    python benchmarks/front.py [--streams 64] [--tokens 500] [--repeats 3] [--path /v1/chat/completions] [--profile]

The front has one core for itself (all its threads); the client and the engine's core process share the other. Tokens
are counted as events, which are one token each, between the first and the last one. CPU time is the front's own.
Median and spread over repeats; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import socket
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import httpx
import psutil

from forerun.engine.config import EngineConfig
from forerun.engine.messages import EngineInfo, EngineStats, NewRequest, RequestOutput, StepOutput
from forerun.request import FinishReason
from forerun.server.run import serve
from forerun.server.settings import ServerSettings, WebSettings

MAX_MODEL_LEN = 100_000
LETTERS = "abcdefghijklmnopqrstuvwxyz"
START_S = 60.0


class Tokenizer:
    """A token a byte; only what the front asks for in plain text."""

    vocab_size = 256
    max_token_bytes = 1
    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


class ZeroCostEngine:
    """One letter a step for each request."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._left: dict[str, int] = {}
        self._stats = EngineStats(num_blocks=1)

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add_request(self, new: NewRequest) -> None:
        self._left[new.request_id] = new.params.max_tokens or 1

    def abort_requests(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._left.pop(request_id, None)

    def step(self) -> StepOutput:
        self._stats.num_steps += 1
        outputs = []
        for request_id, left in list(self._left.items()):
            output = RequestOutput(request_id, [97 + left % 26], LETTERS[left % 26], drafted=[False])
            self._left[request_id] = left - 1
            if left == 1:
                del self._left[request_id]
                output.finish_reason = FinishReason.LENGTH
            outputs.append(output)
        return StepOutput(outputs, self._stats)

    def stats(self) -> EngineStats:
        return self._stats

    def info(self) -> EngineInfo:
        return EngineInfo(
            model="fake",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=512,
            block_size=16,
            num_blocks=1,
            kv_cache_tokens=16,
            vocab_size=256,
            dtype="float32",
            device="cpu",
            load_time_s=0.0,
        )


def make_engine(config: EngineConfig, core: int) -> ZeroCostEngine:
    pin(core)
    return ZeroCostEngine(config)


def pin(core: int) -> None:
    """All threads of this process, those of its sockets included."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def run_front(port: int, own_core: int, other_core: int, streams: int, profile: str | None) -> None:
    pin(own_core)
    config = EngineConfig(model="fake", max_num_seqs=streams)
    web = WebSettings(host="127.0.0.1", port=port, access_log=False, log_level="warning")
    start = partial(
        serve, config, ServerSettings(model="fake"), web, partial(make_engine, core=other_core), Tokenizer()
    )
    if profile is None:
        start()
        return
    profiler = cProfile.Profile()
    profiler.runcall(start)
    profiler.dump_stats(profile)


@contextmanager
def front(streams: int, profile: str | None) -> Iterator[tuple[int, psutil.Process]]:
    """The port of a server, and its process."""
    cores = sorted(os.sched_getaffinity(0))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(
        target=run_front, args=(port, cores[0], cores[-1], streams, profile)
    )
    process.start()
    pin(cores[-1])
    try:
        wait_for(port)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()  # SIGTERM: the server ends its engine too
        process.join()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError("the server did not start")


class Reader(asyncio.Protocol):
    """Sends one request and counts the events of its answer, touching the bytes as little as it can."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self._tail = b""
        self.num_events = 0
        self.first = self.last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        data = self._tail + data
        self.num_events += data.count(b"data: {")
        self._tail = data[-6:]
        if data.endswith(b"0\r\n\r\n"):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._done.set_result(None)


def request_bytes(path: str, num_tokens: int) -> bytes:
    question = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = json.dumps(question | {"max_tokens": num_tokens, "stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1",
        "Host: front",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "",
        "",
    )
    return "\r\n".join(head).encode() + body


async def measure(port: int, path: str, streams: int, num_tokens: int) -> tuple[int, float]:
    """Events that came, and the seconds between the first and the last one."""
    loop = asyncio.get_running_loop()
    readers, request = [], request_bytes(path, num_tokens)
    for _ in range(streams):
        reader = Reader(request, loop.create_future())
        await loop.create_connection(partial(lambda r: r, reader), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.gather(*(reader._done for reader in readers))
    opening = 1 if "chat" in path else 0  # the first chunk of a chat carries the role
    events = sum(reader.num_events - opening for reader in readers)
    return events, max(r.last for r in readers) - min(r.first for r in readers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--path", default="/v1/chat/completions", help="or /v1/completions")
    parser.add_argument("--profile", metavar="FILE", help="write the front's profile, and print where its time goes")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("needs two cores")
    rates, costs, shares = [], [], []
    with front(options.streams, options.profile) as (port, process):
        asyncio.run(measure(port, options.path, options.streams, 50))
        for _ in range(options.repeats):
            before = process.cpu_times()
            events, seconds = asyncio.run(measure(port, options.path, options.streams, options.tokens))
            after = process.cpu_times()
            cpu_s = after.user + after.system - before.user - before.system
            rates.append(events / seconds)
            costs.append(cpu_s / events * 1e6)
            shares.append(events / (options.streams * options.tokens))
            print(f"{rates[-1]:8,.0f} events/s, {costs[-1]:5.1f} us of CPU each, {1 / shares[-1]:.2f} tokens an event")
    if options.profile:
        pstats.Stats(options.profile).sort_stats("tottime").print_stats(35)
    report = {
        "streams": options.streams,
        "tokens": options.tokens,
        "path": options.path,
        "loop": "uvloop" if find_spec("uvloop") else "asyncio",
        "http": "httptools" if find_spec("httptools") else "h11",
        "events_per_s": round(statistics.median(rates)),
        "events_per_s_range": [round(min(rates)), round(max(rates))],
        "cpu_us_per_event": round(statistics.median(costs), 1),
        "tokens_per_event": round(1 / statistics.median(shares), 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
