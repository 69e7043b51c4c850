"""The async front of the engine: starts the core process, submits requests, streams what comes back.

All of it lives in one event loop. Not for use from several threads.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from forerun.engine.config import EngineConfig
from forerun.engine.core import EngineFactory, load_engine, run_core
from forerun.engine.messages import (
    Abort,
    CoreMessage,
    EngineFailed,
    EngineInfo,
    EngineStats,
    FrontMessage,
    NewRequest,
    RequestOutput,
    Shutdown,
    StepOutput,
)
from forerun.errors import (
    ConfigError,
    EngineDeadError,
    ForerunError,
    QueueFullError,
    RequestError,
    RequestFailedError,
)
from forerun.request import FinishReason

logger = logging.getLogger("forerun.engine")

LAST_WORDS_S = 0.5  # after the core's end: how long its last messages may still be under way
MAX_IPC_PATH = 90  # bytes; the kernel's limit for the path of a socket is 107


@dataclass(slots=True)
class Siblings:
    """The n requests that answer one prompt."""

    number: int = 0
    num_left: int = 0  # not finished yet
    longest: int = 0  # most tokens that one of the finished ones has


@dataclass(slots=True)
class RunningRequest:
    """What the front knows of a request under way; times are those of the front's monotonic clock."""

    new: NewRequest
    mailbox: Mailbox
    index: int  # of the request among those of its mailbox
    siblings: Siblings  # itself included
    arrival: float
    first_output: float | None = None
    last_output: float | None = None
    num_tokens: int = 0


class Observer(Protocol):
    """Told of every output as it arrives, whether or not anybody reads it."""

    def output(self, request: RunningRequest, output: RequestOutput, now: float) -> None:
        """`request` is as it was before this output."""
        ...

    def finished(self, request: RunningRequest, reason: FinishReason, output: RequestOutput | None) -> None:
        """`output` is the last one; None where the front ended the request."""
        ...

    def rejected(self, reason: str, number: int) -> None:
        """So many requests were turned away before they ran."""
        ...

    def stepped(self, before: EngineStats, now: EngineStats) -> None:
        """What the core said last and what it says now; a step lies between them, or none."""
        ...


class Mailbox:
    """Outputs of requests that are read together. What is not read in time is merged, so a slow reader costs memory
    for its own text only."""

    def __init__(self) -> None:
        self._pending: dict[int, RequestOutput] = {}
        self._ready = asyncio.Event()
        self._error: ForerunError | None = None

    def put(self, index: int, output: RequestOutput) -> None:
        waiting = self._pending.get(index)
        if waiting is None:
            self._pending[index] = output
        else:
            merge(waiting, output)
        self._ready.set()

    def fail(self, error: ForerunError) -> None:
        self._error = error
        self._ready.set()

    async def take(self) -> list[tuple[int, RequestOutput]]:
        """All that came since the last call, waiting until there is something.

        Raises:
            ForerunError: what `fail` was given, after the outputs that came before it.
        """
        await self._ready.wait()
        if self._pending:
            taken, self._pending = list(self._pending.items()), {}
        elif self._error is not None:
            raise self._error
        else:
            taken = []
        if self._error is None:
            self._ready.clear()
        return taken


def merge(into: RequestOutput, later: RequestOutput) -> None:
    """Make one output of two consecutive ones of a request."""
    into.token_ids += later.token_ids
    into.text += later.text
    into.drafted += later.drafted
    if later.logprobs is not None:
        into.logprobs = (into.logprobs or []) + later.logprobs
    into.prompt_logprobs = into.prompt_logprobs or later.prompt_logprobs
    into.num_cached_tokens = max(into.num_cached_tokens, later.num_cached_tokens)
    for name in ("finish_reason", "stop_reason", "metrics", "error", "error_param", "bad_request"):
        setattr(into, name, getattr(later, name))


class EngineClient:
    """Use `await EngineClient.start(config)`; then `generate`, and `stop` at the end.

    Attributes:
        info: what the core said when it was ready.
        died: set once the core has ended without being asked to.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, factory: EngineFactory = load_engine) -> None:
        self.config = config
        self._observer: Observer | None = None
        self.died = asyncio.Event()
        self._running: dict[str, RunningRequest] = {}
        self._stats = EngineStats()
        self._death: str | None = None
        self._failed: EngineFailed | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)
        self._directory = _socket_directory()
        self._context = zmq.asyncio.Context()
        commands, outputs = f"ipc://{self._directory}/commands", f"ipc://{self._directory}/outputs"
        # Commands are sent from a plain socket, so that an abort needs no await where a generator is being closed.
        self._commands: zmq.SyncSocket = zmq.Context(self._context).socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        for socket, address in ((self._commands, commands), (self._outputs, outputs)):
            socket.set_hwm(0)
            socket.bind(address)
        self._process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=run_core, args=(commands, outputs, config, factory), name="forerun-core", daemon=True
        )

    @classmethod
    async def start(cls, config: EngineConfig, factory: EngineFactory = load_engine) -> EngineClient:
        """Start the core and wait until it is ready.

        Raises:
            ConfigError: the core says that the configuration or the checkpoint cannot be served.
            EngineDeadError: the core died while it started.
        """
        client = cls(config, factory)
        try:
            with without_interrupts():
                client._process.start()
            client._tasks = [asyncio.create_task(client._read()), asyncio.create_task(client._watch())]
            client.info = await client._ready
            client._stats.num_blocks = client.info.num_blocks
        except BaseException:
            if client._process.pid is not None:
                client._process.terminate()  # it may be loading, and would not hear of a shutdown for long
            await client.stop()
            raise
        return client

    @property
    def healthy(self) -> bool:
        return self._death is None and self._process.is_alive()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def stats(self) -> EngineStats:
        """The latest figures of the core, as of its last step."""
        return self._stats

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of outputs as they arrive, from now on.

        Raises:
            ConfigError: somebody is told already; figures would be missing on either side.
        """
        if self._observer is not None:
            raise ConfigError("this engine client has an observer already: one app counts for a client")
        self._observer = observer

    async def generate(self, new: NewRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come; the last one has a finish reason. Closing it early aborts the request.

        Raises: as `generate_many`.
        """
        async with aclosing(self.generate_many([new])) as outputs:
            async for _, output in outputs:
                yield output

    async def generate_many(self, new: Sequence[NewRequest]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index, output) of several requests as they come, until each has finished. One that fails ends them all.

        Raises:
            RequestError: a request is wrong.
            RequestFailedError: the engine could not go on with a request.
            QueueFullError: too many requests wait already.
            EngineDeadError: the core is gone.
        """
        mailbox = self._submit(new)
        left = len(new)
        try:
            while left:
                for index, output in await mailbox.take():
                    _raise_error(output)
                    left -= output.finish_reason is not None
                    yield index, output
        finally:
            self._drop([n.request_id for n in new])

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; whoever reads them gets a last output with finish reason "abort"."""
        for request in self._drop(request_ids):
            last = RequestOutput(request.new.request_id, finish_reason=FinishReason.ABORT)
            request.mailbox.put(request.index, last)

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the core and free the sockets. Requests still running fail. May be called twice."""
        self._declare_dead("the engine was shut down", expected=True)
        with suppress(zmq.ZMQError):
            self._send(Shutdown())
        await asyncio.to_thread(_end, self._process, grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._commands.close(linger=0)
        self._outputs.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _submit(self, new: Sequence[NewRequest]) -> Mailbox:
        if self._death is not None:
            raise EngineDeadError(self._death)
        self.check_room(len(new))
        for request in new:
            if request.request_id in self._running:
                raise RequestError(f"request_id {request.request_id!r} is in use by a running request", "request_id")
        mailbox, siblings = Mailbox(), Siblings()
        for index, request in enumerate(new):
            if request.choice == 0:
                siblings = Siblings()
            siblings.number += 1
            siblings.num_left += 1
            self._running[request.request_id] = RunningRequest(request, mailbox, index, siblings, time.monotonic())
            self._send(request)
        return mailbox

    def check_room(self, number: int, param: str = "prompt") -> None:
        """Whether so many requests may come now. `generate_many` asks too; asking before saves making them.

        Judged by what is under way here: the core's own figures are as old as its last step.

        Raises:
            RequestError: more than there is ever room for; `param` names the field to blame.
            QueueFullError: too many requests wait already.
        """
        seats, queue = self.config.max_num_seqs, self.config.max_num_waiting
        if number > seats + queue:
            self._rejected("too_many_prompts", number)
            raise RequestError(
                f"the request brings {number} prompts (each counts n times), more than max_num_seqs={seats} and "
                f"max_num_waiting={queue} together: send fewer at once",
                param,
            )
        if len(self._running) + number > seats + queue:
            self._rejected("queue_full", number)
            raise QueueFullError(
                f"the queue is full: the request brings {number}, {len(self._running)} are under way, and "
                f"max_num_seqs={seats} may run and max_num_waiting={queue} wait: try again later"
            )

    def _rejected(self, reason: str, number: int) -> None:
        if self._observer is not None:
            self._observer.rejected(reason, number)

    def _drop(self, request_ids: Iterable[str]) -> list[RunningRequest]:
        """Forget requests that still run, here and in the engine."""
        dropped = [r for i in request_ids if (r := self._running.pop(i, None)) is not None]
        if dropped and self._death is None:
            self._send(Abort([r.new.request_id for r in dropped]))
        for request in dropped:
            self._finished(request, FinishReason.ABORT, None)
        return dropped

    def _send(self, message: FrontMessage) -> None:
        # A core that just died takes no messages; the watcher tells whoever waits.
        with suppress(zmq.Again):
            self._commands.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        try:
            await self._read_messages()
        except Exception as error:  # our own mistake; without a reader every request would hang
            logger.exception("the front cannot read the engine's messages")
            self._failed = EngineFailed(f"the front cannot read its messages ({type(error).__name__})")
            self._process.kill()

    async def _read_messages(self) -> None:
        while True:
            message = self._decoder.decode(await self._outputs.recv())
            if isinstance(message, StepOutput):
                self._deliver(message)
            elif isinstance(message, EngineInfo):
                self._ready.set_result(message)
            else:
                self._failed = message

    def _deliver(self, step: StepOutput) -> None:
        if self._observer is not None:
            self._observer.stepped(self._stats, step.stats)
        self._stats = step.stats
        now = time.monotonic()
        for output in step.outputs:
            request = self._running.get(output.request_id)
            if request is None:  # aborted while this step ran
                continue
            if self._observer is not None:
                self._observer.output(request, output, now)
            if output.token_ids:
                request.num_tokens += len(output.token_ids)
                request.last_output = now
                request.first_output = request.first_output or now
            if output.finish_reason is not None:
                del self._running[output.request_id]
                self._finished(request, output.finish_reason, output)
            request.mailbox.put(request.index, output)

    def _finished(self, request: RunningRequest, reason: FinishReason, output: RequestOutput | None) -> None:
        request.siblings.num_left -= 1
        request.siblings.longest = max(request.siblings.longest, request.num_tokens)
        if self._observer is not None:
            self._observer.finished(request, reason, output)

    async def _watch(self) -> None:
        """Wait for the end of the process, let its last messages arrive, and tell everybody."""
        await _process_end(self._process)
        await asyncio.sleep(0)
        deadline = time.monotonic() + LAST_WORDS_S
        while self._failed is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._failed is not None and self._failed.config and not self._ready.done():
            self._ready.set_exception(ConfigError(self._failed.message))
            return
        code = self._process.exitcode
        reason = self._failed.message if self._failed is not None else f"the process ended with exit code {code}"
        self._declare_dead(f"the engine died: {reason}", expected=False)

    def _declare_dead(self, message: str, *, expected: bool) -> None:
        if self._death is not None:
            return
        self._death = message
        if not expected:
            logger.error("%s (%d requests were running)", message, len(self._running))
            self.died.set()
        if not self._ready.done():
            if expected:
                self._ready.cancel()
            else:
                self._ready.set_exception(EngineDeadError(message))
        running, self._running = self._running, {}
        for request in running.values():
            self._finished(request, FinishReason.ERROR, None)
            request.mailbox.fail(EngineDeadError(message))


def _raise_error(output: RequestOutput) -> None:
    if output.finish_reason is not FinishReason.ERROR:
        return
    message = output.error or "the engine could not go on with this request"
    if output.bad_request or output.error_param is not None:
        raise RequestError(message, output.error_param)
    logger.error("request %s failed: %s", output.request_id, message)
    raise RequestFailedError("the engine could not go on with this request")


def _socket_directory() -> Path:
    """A fresh directory that only this user may enter, short enough to hold sockets."""
    directory = Path(tempfile.mkdtemp(prefix="forerun-"))
    if len(str(directory).encode()) > MAX_IPC_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="forerun-", dir="/tmp"))
    return directory


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Ctrl-C reaches a process that is started here once it says what becomes of it: signal masks are inherited."""
    resource_tracker.ensure_running()  # the first process to be spawned starts it, and that unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _process_end(process: BaseProcess) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(process.sentinel, end)
    try:
        await ended
    finally:
        loop.remove_reader(process.sentinel)


def _end(process: BaseProcess, grace_s: float) -> None:
    """Join the process; terminate it, then kill it, where it does not end by itself."""
    if process.pid is None:
        return
    process.join(grace_s)
    for hurry in (process.terminate, process.kill):
        if process.is_alive():
            hurry()
            process.join(grace_s)
