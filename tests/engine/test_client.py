"""The front and the core process, with a fake engine in the core."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.client import EngineClient, Mailbox, merge
from forerun.engine.config import EngineConfig
from forerun.engine.core import EngineFactory
from forerun.engine.messages import NewRequest, RequestOutput
from forerun.errors import ConfigError, EngineDeadError, QueueFullError, RequestError, RequestFailedError
from forerun.request import FinishReason, SamplingParams
from tests.server.fake_engine import answer_text, fake_factory

ROOT = Path(__file__).parents[2]


def new_request(name: str = "r", prompt: str = "hello", max_tokens: int = 10, **params: Any) -> NewRequest:
    return NewRequest(name, list(prompt.encode()), SamplingParams(max_tokens=max_tokens, **params), seed=1)


def with_client(
    use: Callable[[EngineClient], Awaitable[None]], factory: EngineFactory | None = None, **config: Any
) -> None:
    async def main() -> None:
        client = await EngineClient.start(EngineConfig(model="fake", **config), factory or fake_factory())
        directory = client._core.directory
        try:
            await use(client)
        finally:
            await client.stop()
        assert not directory.exists()
        assert client._core.process.exitcode is not None

    asyncio.run(main())


async def collect(client: EngineClient, new: NewRequest) -> list[RequestOutput]:
    async with aclosing(client.generate(new)) as outputs:
        return [output async for output in outputs]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_outputs_join_to_the_whole_answer() -> None:
    async def use(client: EngineClient) -> None:
        outputs = await collect(client, new_request(max_tokens=50))
        assert "".join(o.text for o in outputs) == answer_text(50)
        assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert client.stats().generation_tokens == 50
        assert client.info.max_model_len == 512
        assert client.healthy

    with_client(use)


def test_many_requests_at_once_each_get_their_own_answer() -> None:
    async def use(client: EngineClient) -> None:
        requests = [new_request(f"r{i}", max_tokens=1 + i) for i in range(40)]
        answers = await asyncio.gather(*(collect(client, r) for r in requests))
        for i, outputs in enumerate(answers):
            assert "".join(o.text for o in outputs) == answer_text(1 + i)
        assert client.num_running == 0

    with_client(use)


def test_requests_read_together_keep_their_index() -> None:
    async def use(client: EngineClient) -> None:
        texts = ["", "", ""]
        async with aclosing(
            client.generate_many([new_request(f"r{i}", max_tokens=5 + i) for i in range(3)])
        ) as outputs:
            async for index, output in outputs:
                texts[index] += output.text
        assert texts == [answer_text(5), answer_text(6), answer_text(7)]

    with_client(use)


def test_closing_an_iterator_aborts_in_the_engine_and_tells_the_stats() -> None:
    async def use(client: EngineClient) -> None:
        outputs = client.generate(new_request(max_tokens=500))
        await anext(outputs)
        assert client.stats().num_requests_running == 1
        await outputs.aclose()
        await until(lambda: client.stats().num_requests_running == 0 and client.stats().num_blocks_used == 0)
        assert client.num_running == 0

    with_client(use, fake_factory(step_s=0.01, burst=1))


def test_abort_ends_the_iterator_with_reason_abort() -> None:
    async def use(client: EngineClient) -> None:
        outputs = client.generate(new_request("gone", max_tokens=500))
        await anext(outputs)
        client.abort(["gone", "unknown"])
        assert [o async for o in outputs][-1].finish_reason is FinishReason.ABORT
        await until(lambda: client.stats().num_requests_running == 0)

    with_client(use, fake_factory(step_s=0.01, burst=1))


@pytest.mark.parametrize(("prompt", "error"), [("!reject", RequestError), ("!broken", RequestFailedError)])
def test_a_bad_request_ends_itself_only(prompt: str, error: type[Exception]) -> None:
    async def use(client: EngineClient) -> None:
        good = asyncio.create_task(collect(client, new_request("good", max_tokens=60)))
        with pytest.raises(error) as caught:
            await collect(client, new_request("bad", prompt))
        assert "/some/path" not in str(caught.value)
        assert "".join(o.text for o in await good) == answer_text(60)

    with_client(use)


def test_a_fault_of_one_request_is_not_shown_in_its_error() -> None:
    async def use(client: EngineClient) -> None:
        with pytest.raises(RequestFailedError, match="could not go on"):
            await collect(client, new_request("bad", "!fail"))
        assert client.healthy

    with_client(use)


@pytest.mark.parametrize(
    ("prompt", "words"), [("!raise", "the engine died: ZeroDivisionError$"), ("!die", "exit code -9")]
)
def test_a_dead_core_fails_every_request_with_the_reason(prompt: str, words: str) -> None:
    async def use(client: EngineClient) -> None:
        running = [asyncio.create_task(collect(client, new_request(f"r{i}", max_tokens=500))) for i in range(8)]
        await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError, match=words):
            await collect(client, new_request("killer", prompt))
        for task in running:
            with pytest.raises(EngineDeadError, match=words):
                await task
        assert not client.healthy
        assert client.died.is_set()
        with pytest.raises(EngineDeadError, match=words):
            await collect(client, new_request("late"))

    with_client(use, fake_factory(step_s=0.01, burst=1))


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [("broken", ConfigError, "model.norm.weight is missing"), ("crash", EngineDeadError, "ValueError: no such luck")],
)
def test_a_core_that_cannot_start_says_why(model: str, error: type[Exception], words: str) -> None:
    async def main() -> None:
        with pytest.raises(error, match=words):
            await EngineClient.start(EngineConfig(model=model), fake_factory())

    asyncio.run(main())


def test_a_start_that_is_cancelled_ends_the_core_at_once() -> None:
    async def main() -> None:
        start = asyncio.create_task(EngineClient.start(EngineConfig(model="slow"), fake_factory()))
        await asyncio.sleep(1)
        start.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert time.monotonic() - began < 3

    asyncio.run(main())


def test_the_queue_is_bounded_and_takes_several_requests_or_none() -> None:
    async def use(client: EngineClient) -> None:
        running = [client.generate(new_request(f"r{i}", max_tokens=500)) for i in range(2)]
        for outputs in running:
            await anext(outputs)
        with pytest.raises(QueueFullError, match="brings 2, 2 are under way"):
            await anext(client.generate_many([new_request(name) for name in "ab"]))
        with pytest.raises(RequestError, match="brings 4 prompts"):
            await anext(client.generate_many([new_request(name) for name in "abcd"]))
        await collect(client, new_request("c"))
        for outputs in running:
            await outputs.aclose()

    with_client(use, fake_factory(step_s=0.01, burst=1), max_num_seqs=1, max_num_waiting=2)


def test_requests_that_come_at_once_have_the_seats_before_they_wait() -> None:
    async def use(client: EngineClient) -> None:
        answers = await asyncio.gather(*(collect(client, new_request(f"r{i}")) for i in range(8)))
        assert len(answers) == 8

    with_client(use, fake_factory(step_s=0.01, burst=1), max_num_seqs=64, max_num_waiting=1)


class Deaf:
    def output(self, *_: object) -> None: ...
    def finished(self, *_: object) -> None: ...
    def rejected(self, *_: object) -> None: ...
    def stepped(self, *_: object) -> None: ...


def test_an_observer_is_not_replaced_in_silence() -> None:
    async def use(client: EngineClient) -> None:
        client.observe(Deaf())
        with pytest.raises(ConfigError, match="observer already"):
            client.observe(Deaf())

    with_client(use)


def test_an_id_in_use_is_refused() -> None:
    async def use(client: EngineClient) -> None:
        outputs = client.generate(new_request("same", max_tokens=500))
        await anext(outputs)
        with pytest.raises(RequestError, match="in use") as caught:
            await collect(client, new_request("same"))
        assert caught.value.param == "request_id"
        await anext(outputs)  # the first one goes on
        await outputs.aclose()

    with_client(use, fake_factory(step_s=0.01, burst=1))


def test_a_slow_reader_gets_everything_in_few_pieces() -> None:
    async def use(client: EngineClient) -> None:
        outputs = client.generate(new_request(max_tokens=300, logprobs=1))
        pieces = [await anext(outputs)]
        await until(lambda: client.num_running == 0)
        pieces += [o async for o in outputs]
        assert len(pieces) == 2
        assert "".join(p.text for p in pieces) == answer_text(300)
        assert sum(len(p.logprobs or []) for p in pieces) == 300
        assert pieces[-1].finish_reason is FinishReason.LENGTH
        assert pieces[-1].metrics is not None

    with_client(use)


def test_a_front_that_is_killed_takes_the_core_with_it() -> None:
    script = """
import asyncio, time
from forerun.engine.client import EngineClient
from forerun.engine.config import EngineConfig
from tests.server.fake_engine import fake_factory
async def main():
    client = await EngineClient.start(EngineConfig(model="fake"), fake_factory())
    print(client._core.process.pid, client._core.directory, flush=True)
    await asyncio.sleep(60)
if __name__ == "__main__":
    asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as front:
        assert front.stdout is not None
        pid, directory = front.stdout.readline().split()
        front.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while _alive(int(pid)):
        assert time.monotonic() < deadline, "the core lives on"
        time.sleep(0.02)
    assert not Path(directory).exists()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_merged_outputs_say_what_the_two_said() -> None:
    first = RequestOutput("r", [1], "a", drafted=[True], num_cached_tokens=3)
    later = RequestOutput("r", [2], "b", drafted=[False], finish_reason=FinishReason.STOP, stop_reason="x")
    merge(first, later)
    assert first == RequestOutput(
        "r", [1, 2], "ab", drafted=[True, False], finish_reason=FinishReason.STOP, stop_reason="x", num_cached_tokens=3
    )


def test_a_mailbox_gives_what_came_before_its_error() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        mailbox.put(0, RequestOutput("r", [1]))
        mailbox.fail(EngineDeadError("dead"))
        assert [index for index, _ in await mailbox.take()] == [0]
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await mailbox.take()

    asyncio.run(main())


SPAWN_AND_SHOW_MASK = """
import multiprocessing, signal
from forerun.engine.process import without_interrupts

def show() -> None:
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=show)
    with without_interrupts():
        process.start()
    process.join()
"""


def test_ctrl_c_is_blocked_in_the_first_process_that_is_spawned(tmp_path: Path) -> None:
    """In a fresh interpreter: the first spawn starts multiprocessing's tracker, which unblocks the signal."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN_AND_SHOW_MASK)
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, env=dict(os.environ, PYTHONPATH=str(ROOT))
    )
    assert run.stdout.strip() == "True", run.stderr
