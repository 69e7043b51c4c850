"""Clients that go away, an engine that dies, a queue that is full."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import httpx
import pytest

from tests.server.fake_engine import fake_factory
from tests.server.live import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "hello", "max_tokens": 500}


def idle(server: LiveServer) -> bool:
    stats = server.client.stats()
    return server.client.num_running == 0 and stats.num_requests_running == 0 and stats.num_blocks_used == 0


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_a_stream_that_is_closed_is_aborted(slow_server: LiveServer, num_chunks: int) -> None:
    with slow_server.http() as http:
        for _ in range(5):
            with http.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
                lines = response.iter_lines()
                for _ in range(2 * num_chunks):
                    next(lines)
        slow_server.wait_until(lambda: idle(slow_server), timeout_s=2)
        before = slow_server.client.stats().generation_tokens
        assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert slow_server.client.stats().generation_tokens == before + 1


@pytest.mark.parametrize(
    "body",
    [LONG, LONG | {"stream": True}, LONG | {"prompt": ["a", "b", "c"]}, LONG | {"prompt": ["a"] * 9, "stream": True}],
)
def test_a_client_that_goes_before_the_answer_is_noticed(slow_server: LiveServer, body: dict[str, object]) -> None:
    # The limit is for each read, and a stream that has begun is read in time.
    for timeout_s in (0.002, 0.004) if "stream" in body else (0.002, 0.03, 0.1):
        with slow_server.http() as http, pytest.raises(httpx.TimeoutException):
            http.post(COMPLETIONS, json=body, timeout=timeout_s)
    slow_server.wait_until(lambda: idle(slow_server), timeout_s=2)


def streams_and_health_after(server: LiveServer, kill: Callable[[httpx.Client], None]) -> tuple[list[str], list[int]]:
    """Run 8 streams and 4 plain requests, kill the engine, and give what each of them got."""
    bodies: list[str] = []
    statuses: list[int] = []

    def stream() -> None:
        with server.http() as http:
            bodies.append(http.post(COMPLETIONS, json=LONG | {"stream": True}).text)

    def plain() -> None:
        with server.http() as http:
            statuses.append(http.post(COMPLETIONS, json=LONG).status_code)

    threads = [threading.Thread(target=stream) for _ in range(8)] + [threading.Thread(target=plain) for _ in range(4)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: server.client.stats().num_requests_running == 12)
    with server.http() as http:
        assert http.get("/health").status_code == 200
        kill(http)
        for thread in threads:
            thread.join(20)
        assert http.get("/health").status_code == 503
        assert http.get("/ping").status_code == 503
        late = http.post(COMPLETIONS, json=LONG)
        assert late.status_code == 500
        assert "the engine died" in late.json()["error"]["message"]
        assert http.get("/v1/models").status_code == 200
        assert 'finished_reason="error"' in http.get("/metrics").text
    return bodies, statuses


@pytest.mark.parametrize("how", ["killed", "!die", "!raise"])
def test_when_the_engine_dies_every_request_hears_of_it_and_health_is_503(slow_server: LiveServer, how: str) -> None:
    def kill(http: httpx.Client) -> None:
        if how == "killed":
            slow_server.client._core.process.kill()
        else:
            assert http.post(COMPLETIONS, json={"prompt": how}).status_code == 500

    bodies, statuses = streams_and_health_after(slow_server, kill)
    assert statuses == [500] * 4
    for body in bodies:
        events = body.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        error = json.loads(events[-3].removeprefix("data: "))["error"]
        assert error["message"].startswith("the engine died: ")
        assert error["code"] == 500
        assert "Traceback" not in body
        assert "/dev" not in body
    assert slow_server.client.died.is_set()


def test_a_full_queue_is_503_with_retry_after() -> None:
    factory = fake_factory(step_s=0.01, burst=1)
    with LiveServer(factory=factory, max_num_seqs=1, max_num_waiting=2) as server, server.http() as http:
        with http.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as running:
            lines = running.iter_lines()  # closing it would end the request
            next(lines)
            response = http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            message = response.json()["error"]["message"]
            assert "brings 3, 1 are under way" in message
            assert "try again later" in message
            assert http.post(COMPLETIONS, json={"prompt": ["a", "b"], "max_tokens": 1}).status_code == 200
        server.wait_until(lambda: idle(server))
        assert http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "max_tokens": 1}).status_code == 200
        refused = http.post(COMPLETIONS, json={"prompt": ["a"] * 4})  # at no time could they be taken
        assert refused.status_code == 400
        assert "brings 4 prompts" in refused.json()["error"]["message"]
        refused = http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "n"
        assert "brings 4 prompts (each counts n times)" in refused.json()["error"]["message"]
        assert http.post(COMPLETIONS, json={"prompt": "a", "n": 3, "max_tokens": 1}).status_code == 200
        text = http.get("/metrics").text
        assert 'vllm:admission_rejections_total{model_name="fake",reason="queue_full"} 3.0' in text
        assert 'vllm:admission_rejections_total{model_name="fake",reason="too_many_prompts"} 8.0' in text


def test_an_idle_server_takes_as_many_as_it_has_seats_for() -> None:
    factory = fake_factory(step_s=0.01, burst=1)
    with LiveServer(factory=factory, max_num_seqs=64, max_num_waiting=1) as server, server.http() as http:
        assert http.post(COMPLETIONS, json={"prompt": ["a"] * 8, "max_tokens": 2}).status_code == 200
