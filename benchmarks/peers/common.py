"""What both sides share: answers and figures."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer. seconds: from its first token to its last."""

    num_tokens: int
    seconds: float
    num_drafted: int = 0
    num_accepted: int = 0
    token_ids: tuple[int, ...] = ()


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second after the first token of each answer."""
    return sum(a.num_tokens - 1 for a in answers) / max(1e-9, sum(a.seconds for a in answers))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest: rounds are few."""
    return {name: float(f"{f(values):.4g}") for name, f in (("median", statistics.median), ("low", min), ("high", max))}


def load_average() -> list[float]:
    """Processes that wanted a core over 1, 5 and 15 minutes: above our threads, others took part of the machine."""
    return [round(value, 1) for value in os.getloadavg()]
