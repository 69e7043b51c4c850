"""The process that owns the device: commands in, one step after the other, outputs out.

Nothing here waits for the front: outputs go into a queue without limit (what a request may produce is bounded), and the
socket is waited on only while there is nothing to compute. Not for use in a process that does anything else.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from forerun.engine.config import EngineConfig
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
from forerun.errors import ConfigError, RequestError
from forerun.request import FinishReason

logger = logging.getLogger("forerun.core")

FLUSH_MS = 2000  # how long a dying core tries to get its last words through


class StepEngine(Protocol):
    """What the core needs of an engine; `forerun.engine.engine.Engine` is the real one."""

    @property
    def has_work(self) -> bool: ...
    def add_request(self, new: NewRequest) -> None: ...
    def abort_requests(self, ids: Iterable[str]) -> None: ...
    def step(self) -> StepOutput: ...
    def stats(self) -> EngineStats: ...
    def info(self) -> EngineInfo: ...


EngineFactory = Callable[[EngineConfig], StepEngine]


def load_engine(config: EngineConfig) -> StepEngine:
    """The real engine. Imported here, in the core, so that the front need not load torch."""
    from forerun.engine.engine import Engine

    return Engine.from_config(config)


class CoreSocket:
    """The core's end of the two queues; the front binds, the core connects."""

    def __init__(self, commands_address: str, outputs_address: str) -> None:
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._outputs = self._context.socket(zmq.PUSH)
        for socket in (self._commands, self._outputs):
            socket.set_hwm(0)
        self._commands.connect(commands_address)
        self._outputs.connect(outputs_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)

    def send(self, message: CoreMessage) -> None:
        self._outputs.send(self._encoder.encode(message))

    def receive(self, *, block: bool) -> FrontMessage | None:
        """The next command; None where there is none and `block` is false."""
        try:
            return self._decoder.decode(self._commands.recv(0 if block else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self._commands.close(linger=0)
        self._outputs.close(linger=FLUSH_MS)
        self._context.term()


class EngineCore:
    """Feeds one engine from one socket."""

    def __init__(self, engine: StepEngine, socket: CoreSocket) -> None:
        self._engine = engine
        self._socket = socket

    def run(self) -> None:
        """Serve until the front says `Shutdown`. An exception out of a step is the end of the core."""
        while self._obey():
            if self._engine.has_work:
                self._socket.send(self._engine.step())

    def _obey(self) -> bool:
        """Carry out all commands that are there, waiting for one while there is no work. False: shut down."""
        command = self._socket.receive(block=not self._engine.has_work)
        replies: list[RequestOutput] = []
        tell = False
        while command is not None:
            if isinstance(command, Shutdown):
                return False
            if isinstance(command, Abort):
                self._engine.abort_requests(command.request_ids)
                tell = True  # the front learns what came free, also when no step follows
            elif (refusal := self._add(command)) is not None:
                replies.append(refusal)
            command = self._socket.receive(block=False)
        if tell or replies:
            self._socket.send(StepOutput(replies, self._engine.stats()))
        return True

    def _add(self, new: NewRequest) -> RequestOutput | None:
        """A bad request ends itself: what the engine says of it, or None where it was taken."""
        try:
            self._engine.add_request(new)
        except RequestError as error:
            return RequestOutput(
                new.request_id,
                finish_reason=FinishReason.ERROR,
                error=str(error),
                error_param=error.param,
                bad_request=True,
            )
        except Exception:
            logger.exception("could not take request %s", new.request_id)
            return RequestOutput(new.request_id, finish_reason=FinishReason.ERROR, error="the engine could not take it")
        return None


def run_core(commands_address: str, outputs_address: str, config: EngineConfig, factory: EngineFactory) -> None:
    """Main function of the core process. Exits with 0 after `Shutdown`, with 1 after any failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides what it means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    log_to_stderr("core")
    _die_with_parent(Path(commands_address.removeprefix("ipc://")).parent)
    socket = CoreSocket(commands_address, outputs_address)
    failure = _serve(socket, config, factory)
    if failure is not None:
        socket.send(failure)
    socket.close()
    sys.exit(0 if failure is None else 1)


def _serve(socket: CoreSocket, config: EngineConfig, factory: EngineFactory) -> EngineFailed | None:
    try:
        engine = factory(config)
        socket.send(engine.info())
        EngineCore(engine, socket).run()
    except ConfigError as error:
        return EngineFailed(one_line(str(error)), config=True)
    except Exception as error:
        logger.exception("the engine core failed")
        return EngineFailed(one_line(f"{type(error).__name__}: {error}"))
    return None


def log_to_stderr(process: str) -> None:
    """Our own messages, from INFO on, with the name of the process that says them; other libraries' are left alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s [{process}] %(message)s", "%m-%d %H:%M:%S"))
    ours = logging.getLogger("forerun")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False


def one_line(text: str) -> str:
    return " ".join(text.split())


def _die_with_parent(socket_directory: Path) -> None:
    """A front that is killed takes the core with it, in the middle of loading or of a step as well, and its sockets."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(socket_directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
