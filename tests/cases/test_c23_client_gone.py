"""C23: clients that go away in mid-stream leave nothing behind.

The pool has room for four requests of full length, so fifty that leaked would fill it many times over.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from forerun.engine.messages import NewRequest
from forerun.request import SamplingParams
from tests.cases.conftest import IDLE_WITHIN_S, MakeEngine, Reference, Serve, assert_idle
from tests.cases.material import COMPLETIONS, DISTINCT, LOOPS, complete, metric, prompt_of
from tests.server.live import LiveServer
from tests.tiny_engine import run

METHODS = ["ngram", "suffix", "self"]
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True, "max_draft_tokens": 1}
MANY = 50


def send(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    """A request sent and not waited for."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    content = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def read_chunks(connection: socket.socket, count: int) -> None:
    seen = b""
    while seen.count(b"data: ") < count:
        part = connection.recv(4096)
        assert part, "the stream ended early"
        seen += part


def prompt(place: int) -> list[int]:
    return LOOPS[place % len(LOOPS)] if place % 2 else prompt_of(1000 + place % 3)


def assert_nothing_left(server: LiveServer, ref: Reference) -> None:
    """Idle within two seconds of the last close, no token more after that, and the next request is EQ."""
    assert_idle(server, IDLE_WITHIN_S)
    with server.http() as http:
        before = metric(http, "vllm:generation_tokens_total")
        time.sleep(0.1)
        assert metric(http, "vllm:generation_tokens_total") == before
        assert metric(http, "vllm:kv_cache_usage_perc") == 0
        assert metric(http, "vllm:num_requests_running") == metric(http, "vllm:num_requests_waiting") == 0
        for again in (DISTINCT[1], LOOPS[3]):
            params = SamplingParams(temperature=0, max_tokens=24)
            assert complete(http, again, max_tokens=24).token_ids == ref(again, params).token_ids


def num_aborted(server: LiveServer) -> float:
    with server.http() as http:
        lines = [x for x in http.get("/metrics").text.splitlines() if 'finished_reason="abort"' in x]
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total"))


@pytest.mark.parametrize("method", METHODS)
def test_fifty_streams_that_are_closed_free_all_they_held(method: str, serve: Serve, ref: Reference) -> None:
    """C23: closed before the first chunk, after the first and after three."""
    server = serve(method)
    aborted = num_aborted(server)
    for place in range(MANY):
        with send(server, LONG | {"prompt": prompt(place), "stream": True}) as connection:
            read_chunks(connection, (0, 1, 3)[place % 3])
    assert_nothing_left(server, ref)
    # One that is closed at once may not have been heard of at all.
    assert num_aborted(server) - aborted >= 0.6 * MANY


@pytest.mark.parametrize("method", METHODS)
def test_whole_answers_that_nobody_waits_for_are_stopped(method: str, serve: Serve, ref: Reference) -> None:
    """C23: the same for requests that do not stream, at once and after a while."""
    server = serve(method)
    aborted = num_aborted(server)
    for place in range(MANY // 2):
        with send(server, LONG | {"prompt": prompt(place)}):
            time.sleep(0.004 * (place % 4))
    assert_nothing_left(server, ref)
    assert num_aborted(server) - aborted >= 0.3 * MANY / 2


@pytest.mark.parametrize("method", METHODS)
def test_four_choices_of_one_closed_stream_all_end(method: str, serve: Serve, ref: Reference) -> None:
    """C23 with n=4 and two prompts, several such streams open at once: more than the pool holds, so some still wait."""
    server = serve(method)
    for place in range(4):
        body = LONG | {"prompt": [prompt(place), prompt(place + 1)], "n": 4, "stream": True}
        connections = [send(server, body) for _ in range(3)]
        read_chunks(connections[0], 1 + place)
        for connection in connections:
            connection.close()
    assert_nothing_left(server, ref)


@pytest.mark.parametrize("method", METHODS)
def test_aborted_requests_leave_no_state_in_the_engine(method: str, engines: MakeEngine, ref: Reference) -> None:
    """C23 in the engine: aborted while waiting, in the middle of a prompt, and while decoding; a small pool."""
    engine = engines(method, kv_cache_memory_bytes=8 * 8192, max_num_batched_tokens=16, max_model_len=100)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for round_ in range(MANY):
        ids = [f"r{round_}-{i}" for i in range(4)]
        for i, request_id in enumerate(ids):
            engine.add_request(NewRequest(request_id, prompt_of(i, 30), params, 0))
        for _ in range(round_ % 7):
            engine.step()
            engine.scheduler.check_integrity()
        engine.abort_requests([*ids, "unknown"])
        engine.scheduler.check_integrity()
        assert not engine.has_work
        assert engine.scheduler.target.num_used == 0
        assert engine.outputs._detokenizers == {}
    (result,) = run(engine, [(LOOPS[3], params)])
    assert result.key == ref(LOOPS[3], params).key
