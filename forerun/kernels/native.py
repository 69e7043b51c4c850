"""The door to the CPU extension: what it can do, on which instruction set, with how many threads.

`available()` is asked first; without the extension (no C++ compiler at install, or a bare source tree) models run on
plain torch. The environment variable FORERUN_ISA (portable, avx2, avxvnni, avx512, avx512vnni) limits the instruction
set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_native: ModuleType | None
try:
    from forerun import _native
except ImportError:
    _native = None


def available() -> bool:
    """Whether the extension is there."""
    return _native is not None


def extension() -> ModuleType:
    """The extension itself, for the doors beside this one."""
    assert _native is not None, "ask available() first"
    return _native


def isas() -> list[str]:
    """The instruction sets that this CPU can run, the plainest first."""
    names: list[str] = extension().isas()
    return names


def isa() -> str:
    """The one in use."""
    return str(extension().isa())


def num_threads() -> int:
    """Threads that share a call, the calling one included; at start, the cores that the process may use."""
    return int(extension().num_threads())


def set_num_threads(count: int) -> None:
    """For the whole process; at least 1. No result depends on it."""
    extension().set_num_threads(count)


@contextmanager
def use(isa: str | None = None, num_threads: int | None = None) -> Iterator[None]:
    """For tests and benchmarks: another instruction set, other threads, until the block ends."""
    native = extension()
    before = native.isa(), native.num_threads()
    try:
        if isa is not None:
            native.set_isa(isa)
        if num_threads is not None:
            native.set_num_threads(num_threads)
        yield
    finally:
        native.set_isa(before[0])
        native.set_num_threads(before[1])
