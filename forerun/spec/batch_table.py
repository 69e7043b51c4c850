"""`num_speculative_tokens_per_batch_size`: reading a table of [start, end, K] and making it whole. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from forerun.spec.refusal import refuse, show

Table = tuple[tuple[int, int, int], ...]

KEY = "num_speculative_tokens_per_batch_size"
EXAMPLE = "[[1, 4, 5], [5, 16, 2], [17, 64, 0]]"
MAX_RANGES = 1024
MAX_REQUESTS = 2**31 - 1


def read_table(value: object) -> Table:
    """The ranges in order of their starts, with gaps closed: a gap keeps the K of the range before it.

    Raises:
        ConfigError: no list of triples, a range that is none, two ranges that overlap, or none that begins at 1.
    """
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_RANGES:
        refuse(f"{KEY} must be a list of 1 to {MAX_RANGES} ranges [start, end, K] such as {EXAMPLE}, got {show(value)}")
    ranges = sorted(_read_range(place, entry) for place, entry in enumerate(value))
    for (start, end, k), later in itertools.pairwise(ranges):
        if later[0] <= end:
            refuse(f"{KEY}: the ranges {show([start, end, k])} and {show(list(later))} overlap: let one end earlier")
    if ranges[0][0] != 1:
        refuse(f"{KEY} must begin at 1 request: the first range is {show(list(ranges[0]))}")
    starts = [start for start, _, _ in ranges[1:]]
    ends = [start - 1 for start in starts] + [ranges[-1][1]]
    return tuple((start, end, k) for (start, _, k), end in zip(ranges, ends, strict=True))


def _read_range(place: int, entry: object) -> tuple[int, int, int]:
    where = f"{KEY}[{place}]={show(entry)}"
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        refuse(f"{where} must be a range [start, end, K]")
    for name, number in zip(("start", "end", "K"), entry, strict=True):
        if isinstance(number, bool) or not isinstance(number, int):
            refuse(f"{where}: {name} must be an integer, got {show(number)}")
        if not (name != "K") <= number <= MAX_REQUESTS:
            refuse(f"{where}: {name} must be {int(name != 'K')} to {MAX_REQUESTS}, got {show(number)}")
    start, end, k = entry
    if start > end:
        refuse(f"{where}: start must not be above end")
    return start, end, k


def clamp(table: Table, num_speculative_tokens: int) -> tuple[Table, list[str]]:
    """The table with no K above the one given, and a warning where that changed it."""
    warnings = [
        f"{KEY}: K={k} for {start} to {end} requests is above num_speculative_tokens={num_speculative_tokens}, which "
        "is taken instead"
        for start, end, k in table
        if k > num_speculative_tokens
    ]
    return tuple((start, end, min(k, num_speculative_tokens)) for start, end, k in table), warnings


def describe(table: Sequence[tuple[int, int, int]]) -> str:
    """One line for the log: what holds for how many decoding requests."""
    parts = [f"{start}-{end}: {k}" if start < end else f"{start}: {k}" for start, end, k in table[:-1]]
    start, _, k = table[-1]
    return ", ".join([*parts, f"{start} and more: {k}"])
