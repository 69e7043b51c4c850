"""An engine that is killed while it serves, and the one that takes its place."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from forerun.engine import restarts
from forerun.engine.config import EngineConfig
from forerun.engine.messages import EngineStats
from forerun.engine.restarts import Restarts
from forerun.errors import ConfigError
from forerun.spec.stats import SpecTotals
from tests.server.fake_engine import answer_text, fake_factory, start_once
from tests.server.live import LiveServer
from tests.server.test_system import read_metrics

COMPLETIONS = "/v1/completions"
NUM_STREAMS = 32


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.2)


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer(factory=fake_factory(step_s=0.01, burst=1), max_engine_restarts=3) as live:
        yield live


def run_streams(server: LiveServer) -> tuple[list[threading.Thread], list[str]]:
    """Streams under way, and where their answers will be."""
    bodies: list[str] = []

    def stream() -> None:
        with server.http() as http:
            body = {"prompt": "hello", "max_tokens": 500, "stream": True}
            bodies.append(http.post(COMPLETIONS, json=body).text)

    threads = [threading.Thread(target=stream) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: server.client.stats().num_requests_running == NUM_STREAMS, timeout_s=20)
    return threads, bodies


def test_every_stream_hears_of_the_death_and_another_engine_takes_over(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with server.http() as http:
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 40}).status_code == 200
        threads, bodies = run_streams(server)
        dead = server.client._core
        dead.process.kill()
        for thread in threads:
            thread.join(20)
        refused = http.post(COMPLETIONS, json={"prompt": "a"})
        health = http.get("/health")
        assert refused.status_code == health.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "another one is being started: try again later" in refused.json()["error"]["message"]
        assert "the engine died" in health.json()["error"]["message"]
        assert 'forerun:engine_healthy{engine="0",model_name="fake"} 0.0' in http.get("/metrics").text
        server.wait_until(lambda: server.client.healthy, timeout_s=20)

        assert http.get("/health").status_code == 200
        answer = http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 60}).json()
        assert answer["choices"][0]["text"] == answer_text(60)
        found = read_metrics(http)
        assert found["forerun:engine_restarts_total"] == found["forerun:engine_healthy"] == 1
        assert found["vllm:generation_tokens_total"] >= 40 + NUM_STREAMS + 60  # counters go on
        assert found["vllm:request_success_total error"] == NUM_STREAMS
        assert found["vllm:kv_cache_usage_perc"] == found["vllm:num_requests_running"] == 0
    for body in bodies:
        events = body.split("\n\n")
        error = json.loads(events[-3].removeprefix("data: "))["error"]
        assert error == {
            "message": "the engine died: the process ended with exit code -9",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        assert events[-2:] == ["data: [DONE]", ""]
    assert len(bodies) == NUM_STREAMS
    assert not psutil.pid_exists(dead.process.pid)
    assert not dead.directory.exists()
    said = [r.getMessage() for r in caplog.records if r.name == "forerun.engine"]
    assert said == [
        f"the engine died: the process ended with exit code -9 ({NUM_STREAMS} requests were running)",
        "another engine starts in 0.2 s (restart 1)",
        "the engine is back (restart 1)",
    ]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    logger = logging.getLogger("forerun.engine")
    logger.addHandler(caplog.handler)
    before, logger.level = logger.level, logging.INFO
    propagate, logger.propagate = logger.propagate, False
    yield
    logger.removeHandler(caplog.handler)
    logger.level, logger.propagate = before, propagate


def test_restarts_leave_no_file_open(server: LiveServer) -> None:
    this = psutil.Process()

    def kill_and_wait(number: int) -> int:
        server.client._core.process.kill()
        server.wait_until(lambda: server.client.num_restarts == number and server.client.healthy, timeout_s=20)
        return this.num_fds()

    first = kill_and_wait(1)
    assert kill_and_wait(2) == first


def test_an_engine_that_does_not_come_back_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    factory = partial(start_once, mark=tmp_path / "started")
    with LiveServer(factory=factory, max_engine_restarts=2) as server, server.http() as http:
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 7}).status_code == 200
        server.client._core.process.kill()
        server.wait_until(server.client.died.is_set, timeout_s=20)
        refused = http.post(COMPLETIONS, json={"prompt": "a"})
        assert refused.status_code == 500
        assert refused.json()["error"]["message"] == "the engine cannot be started again"
        assert "/models/gone" in caplog.text  # the log says where
        assert http.get("/health").status_code == 503
        assert server.client.num_restarts == 2
        assert server.client.stats().generation_tokens == 7


@pytest.mark.parametrize("number", [0, 1], ids=["in the pause", "while another engine starts"])
def test_a_server_that_ends_in_the_midst_of_a_restart_leaves_no_process(tmp_path: Path, number: int) -> None:
    factory = partial(start_once, mark=tmp_path / "started", hang=True)
    with LiveServer(factory=factory, max_engine_restarts=2) as server:
        server.client._core.process.kill()
        server.wait_until(lambda: not server.client.healthy and server.client.num_restarts == number)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    core = server.client._core
    assert core.process.exitcode is not None
    assert not core.directory.exists()


def test_pauses_double_up_to_a_bound_and_end_with_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    some = Restarts(3)
    assert [some.next_delay(lived_s=1.0) for _ in range(4)] == [0.5, 1.0, 2.0, None]
    assert some.next_delay(lived_s=restarts.SETTLED_S) == 0.5
    assert Restarts(0).next_delay(lived_s=1e9) is None
    many = Restarts(20)
    assert [many.next_delay(lived_s=0.0) for _ in range(20)][-1] == restarts.LONGEST_DELAY_S
    with pytest.raises(ConfigError, match="max_engine_restarts"):
        EngineConfig(model="m", max_engine_restarts=-1)


def test_counters_go_on_and_gauges_do_not() -> None:
    past = EngineStats(num_blocks_used=3, num_blocks=9, generation_tokens=5, step_time_s=0.5)
    past.spec = SpecTotals(2, 8, 3, [2, 1])
    past.spec_by_proposer = {"ngram": past.spec}
    now = EngineStats(num_blocks_used=1, num_blocks=7, generation_tokens=2, spec=SpecTotals(1, 4, 3, [1, 1, 1]))
    now.spec_by_proposer = {"suffix": now.spec}
    total = now.after(past.counters())
    assert (total.num_blocks_used, total.num_blocks, total.generation_tokens, total.step_time_s) == (1, 7, 7, 0.5)
    assert total.spec == SpecTotals(3, 12, 6, [3, 2, 1])
    assert total.spec_by_proposer == {"ngram": past.spec, "suffix": now.spec}
