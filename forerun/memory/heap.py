"""The C library's heap. No torch here."""

from __future__ import annotations

import contextlib
import ctypes


def trim_heap() -> None:
    """Give what was freed back to the system, for after work that made and dropped many small objects.

    glibc keeps free memory that lies below anything in use: 50 to 100 MB after a large vocabulary has been built. Does
    nothing where the C library has no `malloc_trim`.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
