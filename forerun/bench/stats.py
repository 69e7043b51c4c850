"""Ratios with their intervals. Pure functions over numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
METHOD = "95 % intervals: paired t over the logarithms of the windows' ratios"


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times the baseline, with the interval that holds the true ratio in 95 of 100 such measurements.

    Attributes:
        value: the geometric mean over windows.
        low, high: None with fewer than two windows, which say nothing of their own spread.
    """

    value: float
    low: float | None
    high: float | None
    num_windows: int

    @property
    def says(self) -> int:
        """1: faster, -1: slower, 0: the interval does not let one say."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 1) - int(self.high < 1)


def paired_ratio(treated: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """The ratio of two rates that were measured in the same windows, one value each, all above 0.

    Logarithms, since a ratio of 2 and one of 1/2 are equally far from 1; pairs, since a window has prompts of its own
    and a machine that is slow for both sides.

    Raises:
        ValueError: the lengths differ, there are no windows, or a value is not above 0.
    """
    if len(treated) != len(baseline) or not treated or min(*treated, *baseline) <= 0:
        raise ValueError(f"pairs of values above 0 are needed, got {treated} and {baseline}")
    logs = np.log(np.asarray(treated) / np.asarray(baseline))
    count, mean = len(logs), float(logs.mean())
    if count < 2:
        return Ratio(math.exp(mean), None, None, count)
    half = t_quantile(0.5 + confidence / 2, count - 1) * float(logs.std(ddof=1)) / math.sqrt(count)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)


def t_quantile(probability: float, degrees: int) -> float:
    """Of Student's t distribution, for probabilities from 0.5 to below 1, to 1e-9 of itself."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < probability else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """That Student's t is at most `t`, which is at least 0.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4: finite sums for whole degrees of freedom.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):  # cos^(k - 1), with the product of odd by even numbers
        total += term
        term *= square * k / (k + 1)
    between = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + between / 2
