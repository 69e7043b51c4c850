"""One core process as the front sees it: its start, two sockets to it, its end. Not for use from several threads."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from forerun.engine.config import EngineConfig
from forerun.engine.core import EngineFactory, run_core
from forerun.engine.messages import CoreMessage, FrontMessage
from forerun.models.confine import memory_limit

MAX_IPC_PATH = 90  # bytes; the kernel's limit for the path of a socket is 107


class CoreProcess:
    """Use `start`, then `send` and `receive`; `close` at the end, whatever happened.

    Attributes:
        directory: holds the sockets; gone after `close`.
        process: the process; nobody but this object joins it.
    """

    def __init__(self, config: EngineConfig, factory: EngineFactory) -> None:
        self.directory = _socket_directory()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)
        self._context = zmq.asyncio.Context()
        commands, outputs = f"ipc://{self.directory}/commands", f"ipc://{self.directory}/outputs"
        # Commands are sent from a plain socket, so that an abort needs no await where a generator is being closed.
        self._commands: zmq.SyncSocket = zmq.Context(self._context).socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        for socket, address in ((self._commands, commands), (self._outputs, outputs)):
            socket.set_hwm(0)
            socket.bind(address)
        self.process = multiprocessing.get_context("spawn").Process(
            target=run_core, args=(commands, outputs, config, factory), name="forerun-core", daemon=True
        )

    def start(self) -> None:
        with without_interrupts(), memory_limit.lifted():
            self.process.start()

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def send(self, message: FrontMessage) -> None:
        """Never waits. A core that just died takes no messages; whoever waits hears of it from `ended`."""
        with suppress(zmq.Again):
            self._commands.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def receive(self) -> CoreMessage:
        """The next message. One that is there already is given at once, without a turn for other tasks.

        Raises:
            msgspec.DecodeError: it is none of ours.
        """
        return self._decoder.decode(await self._outputs.recv())

    async def ended(self) -> None:
        """Wait for the end of the process."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(self.process.sentinel, end)
        try:
            await ended
        finally:
            loop.remove_reader(self.process.sentinel)

    def terminate(self) -> None:
        """Ask the process to end in the midst of whatever it does; nothing where it was never started."""
        if self.process.pid is not None:
            self.process.terminate()

    async def join(self, grace_s: float) -> None:
        """Wait for the end; terminate the process, then kill it, where it does not end by itself."""
        if self.process.pid is not None:
            await asyncio.to_thread(self._join, grace_s)

    def _join(self, grace_s: float) -> None:
        self.process.join(grace_s)
        for hurry in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                hurry()
                self.process.join(grace_s)

    def close(self) -> None:
        """Free the sockets; nobody may be receiving any more. May be called twice."""
        self._commands.close(linger=0)
        self._outputs.close(linger=0)
        self._context.term()
        shutil.rmtree(self.directory, ignore_errors=True)


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
