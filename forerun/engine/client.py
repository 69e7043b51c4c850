"""The async front of the engine: starts the core process, submits requests, streams what comes back.

All of it lives in one event loop. Not for use from several threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from forerun.engine.config import EngineConfig
from forerun.engine.core import EngineFactory, load_engine
from forerun.engine.messages import (
    Abort,
    EngineFailed,
    EngineInfo,
    EngineStats,
    NewRequest,
    RequestOutput,
    Shutdown,
    StepOutput,
)
from forerun.engine.process import CoreProcess
from forerun.engine.restarts import Restarts
from forerun.errors import (
    ConfigError,
    EngineDeadError,
    ForerunError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    UnavailableError,
)
from forerun.request import FinishReason

logger = logging.getLogger("forerun.engine")

LAST_WORDS_S = 0.5  # after the core's end: how long its last messages may still be under way


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

    A core that dies fails the requests that it held. Where `config.max_engine_restarts` allows, another is started in
    its place; requests are refused meanwhile as ones to try again.

    Attributes:
        info: what the core said when it was ready.
        num_restarts: cores that were started in the place of dead ones, those included that did not come up.
        died: set once there is no core, and none will be started.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, factory: EngineFactory = load_engine) -> None:
        self.config = config
        self.num_restarts = 0
        self.died = asyncio.Event()
        self._factory = factory
        self._observer: Observer | None = None
        self._restarts = Restarts(config.max_engine_restarts)
        self._running: dict[str, RunningRequest] = {}
        self._stats = EngineStats()
        self._past: EngineStats | None = None  # counters of cores that ended
        self._trouble: ForerunError | None = UnavailableError("the engine is starting: try again later")
        self._closing: UnavailableError | None = None
        self._failed: EngineFailed | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._core = CoreProcess(config, factory)

    @classmethod
    async def start(cls, config: EngineConfig, factory: EngineFactory = load_engine) -> EngineClient:
        """Start the core and wait until it is ready.

        Raises:
            ConfigError: the core says that the configuration or the checkpoint cannot be served.
            EngineDeadError: the core died while it started.
        """
        client = cls(config, factory)
        try:
            await client._launch()
        except BaseException:
            await client.stop()
            raise
        client._supervisor = asyncio.create_task(client._supervise())
        return client

    @property
    def trouble(self) -> str | None:
        """Why no request is taken now, or None."""
        trouble = self._closing or self._trouble
        if trouble is None and not self._core.alive:  # it ended just now
            return "the engine died"
        return None if trouble is None else str(trouble)

    @property
    def healthy(self) -> bool:
        return self.trouble is None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def stats(self) -> EngineStats:
        """The latest figures of the core, as of its last step; counters go on where the core before it ended."""
        return self._stats if self._past is None else self._stats.after(self._past)

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
            UnavailableError: no request is taken at the moment.
            RequestTimeoutError: they took longer than `config.request_timeout_s`.
            EngineDeadError: the core is gone.
        """
        mailbox = self._submit(new)
        left = len(new)
        timer = self._time_limit(mailbox)
        try:
            while left:
                for index, output in await mailbox.take():
                    _raise_error(output)
                    left -= output.finish_reason is not None
                    yield index, output
        finally:
            if timer is not None:
                timer.cancel()
            self._drop([n.request_id for n in new])

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; whoever reads them gets a last output with finish reason "abort"."""
        for request in self._drop(request_ids):
            last = RequestOutput(request.new.request_id, finish_reason=FinishReason.ABORT)
            request.mailbox.put(request.index, last)

    def refuse(self, message: str) -> None:
        """Take no new requests from now on, for good; those that run go on."""
        self._closing = UnavailableError(message)

    def end_all(self, message: str) -> None:
        """Fail all requests that run: whoever reads them is told so."""
        with suppress(zmq.ZMQError):
            self._core.send(Abort(list(self._running)))
        self._fail_all(EngineDeadError(message))

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the core and free the sockets. Requests still running fail. May be called twice."""
        ended = EngineDeadError("the engine was shut down")
        self._trouble = self._trouble or ended
        self._fail_all(ended)
        await _cancel(self._supervisor)
        if not self._ready.done():
            self._core.terminate()  # it may be loading, and would not hear of a shutdown for long
        with suppress(zmq.ZMQError):
            self._core.send(Shutdown())
        await self._dispose(grace_s)

    def _submit(self, new: Sequence[NewRequest]) -> Mailbox:
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
            self._core.send(request)
        return mailbox

    def _time_limit(self, mailbox: Mailbox) -> asyncio.TimerHandle | None:
        limit_s = self.config.request_timeout_s
        if limit_s is None:
            return None
        error = RequestTimeoutError(f"the request took longer than request_timeout={limit_s:g} seconds")
        return asyncio.get_running_loop().call_later(limit_s, mailbox.fail, error)

    def check_room(self, number: int, param: str = "prompt") -> None:
        """Whether so many requests may come now. `generate_many` asks too; asking before saves making them.

        Judged by what is under way here: the core's own figures are as old as its last step.

        Raises:
            RequestError: more than there is ever room for; `param` names the field to blame.
            QueueFullError: too many requests wait already.
            UnavailableError, EngineDeadError: no request is taken now, or none any more.
        """
        if (trouble := self._closing or self._trouble) is not None:
            raise type(trouble)(*trouble.args)
        seats, queue = self.info.max_num_seqs, self.config.max_num_waiting
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
        if dropped:
            self._core.send(Abort([r.new.request_id for r in dropped]))
        for request in dropped:
            self._finished(request, FinishReason.ABORT, None)
        return dropped

    async def _read(self, core: CoreProcess) -> None:
        try:
            await self._read_messages(core)
        except Exception as error:  # our own mistake; without a reader every request would hang
            logger.exception("the front cannot read the engine's messages")
            self._failed = EngineFailed(f"the front cannot read its messages ({type(error).__name__})")
            core.process.kill()

    async def _read_messages(self, core: CoreProcess) -> None:
        while True:
            message = await core.receive()
            if isinstance(message, StepOutput):
                self._deliver(message)
                # Messages that are there already make `receive` return at once: without a turn for those who read the
                # outputs, a core faster than this loop would keep every answer back until it is idle.
                await asyncio.sleep(0)
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

    async def _launch(self) -> None:
        """Start the core and wait until it is ready. Raises: as `start`."""
        self._core.start()
        self._reader = asyncio.create_task(self._read(self._core))
        end = asyncio.create_task(self._death())
        try:
            either: set[asyncio.Future[Any]] = {self._ready, end}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                if self._failed is not None and self._failed.config:
                    raise ConfigError(self._failed.message)
                raise EngineDeadError(end.result())
        finally:
            await _cancel(end)
        self.info = self._ready.result()
        self._stats = EngineStats(num_blocks=self.info.num_blocks)
        self._trouble = None

    async def _death(self) -> str:
        """Wait for the end of the core, let its last messages arrive, and say what it died of."""
        await self._core.ended()
        await asyncio.sleep(0)
        deadline = time.monotonic() + LAST_WORDS_S
        while self._failed is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._failed is not None:
            return f"the engine died: {self._failed.message}"
        self._core.process.join()
        return self._shown()

    async def _supervise(self) -> None:
        """Whenever the core dies, tell everybody, and start another one as often as that may be."""
        while True:
            began = time.monotonic()
            message, shown = await self._death(), self._shown()
            lived_s = time.monotonic() - began
            while (delay_s := self._restarts.next_delay(lived_s)) is not None:
                self._mourn(message, shown, UnavailableError(f"{shown}; another one is being started: try again later"))
                logger.warning("another engine starts in %.1f s (restart %d)", delay_s, self.num_restarts + 1)
                await asyncio.sleep(delay_s)
                try:
                    await self._replace()
                    break
                except (ConfigError, EngineDeadError, OSError) as error:
                    message, shown, lived_s = str(error), "the engine cannot be started again", 0.0
            else:
                self._mourn(message, shown, EngineDeadError(shown))
                self.died.set()
                return
            logger.info("the engine is back (restart %d)", self.num_restarts)

    def _shown(self) -> str:
        """What clients are told of the core's death: what it died of, and nothing of the machine."""
        if self._failed is None:
            return f"the engine died: the process ended with exit code {self._core.process.exitcode}"
        return f"the engine died: {self._failed.message.partition(':')[0]}"

    def _mourn(self, message: str, shown: str, trouble: ForerunError) -> None:
        logger.error("%s (%d requests were running)", message, len(self._running))
        self._trouble = trouble
        self._past, self._stats = self.stats().counters(), EngineStats()
        self._fail_all(EngineDeadError(shown))

    async def _replace(self) -> None:
        """Start a core in the place of one that ended. Raises: as `start`."""
        await self._dispose()
        self.num_restarts += 1
        self._failed = None
        self._ready = asyncio.get_running_loop().create_future()
        self._core = CoreProcess(self.config, self._factory)
        await self._launch()

    async def _dispose(self, grace_s: float = 0.0) -> None:
        """Leave nothing of the core: neither process nor sockets."""
        await self._core.join(grace_s)
        await _cancel(self._reader)
        self._core.close()

    def _fail_all(self, error: ForerunError) -> None:
        running, self._running = self._running, {}
        for request in running.values():
            self._finished(request, FinishReason.ERROR, None)
            request.mailbox.fail(error)


async def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _raise_error(output: RequestOutput) -> None:
    if output.finish_reason is not FinishReason.ERROR:
        return
    message = output.error or "the engine could not go on with this request"
    if output.bad_request or output.error_param is not None:
        raise RequestError(message, output.error_param)
    logger.error("request %s failed: %s", output.request_id, message)
    raise RequestFailedError("the engine could not go on with this request")
