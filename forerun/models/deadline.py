"""A limit on the time that foreign Python code may take in the thread that runs it: chat templates are programs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeadlineError(Exception):
    """The code took longer than it may."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End what runs inside with a DeadlineError once it took so long.

    It takes effect between two steps of the interpreter: one long call into C is waited for. For code that swallows no
    exceptions and holds nothing that must be put back.
    """
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not over:
                _raise_in(thread, DeadlineError)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
        _raise_in(thread, None)  # one that was raised and has not arrived yet


def _raise_in(thread: int, kind: type[Exception] | None) -> None:
    error = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
