"""Limits on foreign Python code in our own process: chat templates are programs that come with a model."""

from __future__ import annotations

import ctypes
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST_STEPS = 10_000  # of the interpreter, far more than an exception is under way


class DeadlineError(Exception):
    """The code took longer than it may."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End what runs inside with a DeadlineError once it took so long.

    It takes effect between two steps of the interpreter: one long call into C is waited for. For code that swallows no
    exceptions and holds nothing that must be put back.
    """
    thread, lock = threading.get_ident(), threading.Lock()
    over = raised = arrived = False

    def interrupt() -> None:
        nonlocal raised
        with lock:
            if not over:
                raised = True
                _raise_in(thread, DeadlineError)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except DeadlineError:
        arrived = True
        raise
    finally:
        timer.cancel()
        with lock:
            over = True
        if raised and not arrived:
            _let_arrive()


def _let_arrive() -> None:
    """Take an exception that was raised in this thread and is on its way; it comes with one of the next steps.

    Taking it back instead (an exception of NULL) would leave CPython 3.11 looking for one at every step for good, and
    hang whatever is traced.
    """
    with suppress(DeadlineError):
        for _ in range(MOST_STEPS):
            pass


class MemoryLimit:
    """The limit on this process's memory, of which there is one: use `memory_limit`.

    For a process in which nobody needs much memory meanwhile, such as a server's front.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._outside = self._inside = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    @contextmanager
    def at(self, num_bytes: int) -> Iterator[None]:
        """Let allocations fail (MemoryError) that take the process more than `num_bytes` above what it has now. Where
        several are inside, the first one's limit holds."""
        with self._lock:
            if self._num_inside == 0:
                self._outside = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
                most = _address_space() + num_bytes
                self._inside = (most if soft == resource.RLIM_INFINITY else min(most, soft), hard)
                resource.setrlimit(resource.RLIMIT_AS, self._inside)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    resource.setrlimit(resource.RLIMIT_AS, self._outside)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For a moment in which a process is started, which inherits the limit."""
        with self._lock:
            if self._num_inside:
                resource.setrlimit(resource.RLIMIT_AS, self._outside)
            try:
                yield
            finally:
                if self._num_inside:
                    resource.setrlimit(resource.RLIMIT_AS, self._inside)


memory_limit = MemoryLimit()


def _address_space() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _raise_in(thread: int, kind: type[Exception]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
