"""Pearson's chi-square test with what it can and cannot find, computed and not assumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_EXPECTED = 5.0
POWER = 0.99


@dataclass
class ChiSquare:
    """Cells of one test: counts seen beside those expected. Several samples may be added, each with its own law.

    Attributes:
        statistic: sum of (seen - expected)^2 / expected.
        degrees: cells less one, over all samples.
        num_draws: of all samples.
        impossible: draws of what has no probability at all: one is enough to fail.
    """

    statistic: float = 0.0
    degrees: int = 0
    num_draws: int = 0
    impossible: int = 0

    def add(self, seen: Sequence[int], probabilities: Sequence[float], impossible: int = 0) -> None:
        """A sample of `sum(seen) + impossible` draws. The rarest cells are pooled until each expects MIN_EXPECTED."""
        num_draws = sum(seen)
        self.num_draws += num_draws + impossible
        self.impossible += impossible
        cells = pooled(seen, [p * num_draws for p in probabilities])
        self.statistic += sum((count - expected) ** 2 / expected for count, expected in cells)
        self.degrees += max(0, len(cells) - 1)

    def join(self, other: ChiSquare) -> None:
        """Add the samples of another test, which must be independent of these."""
        self.statistic += other.statistic
        self.degrees += other.degrees
        self.num_draws += other.num_draws
        self.impossible += other.impossible

    @property
    def p_value(self) -> float:
        """The chance of a statistic as large as this where the law holds."""
        if self.impossible:
            return 0.0
        return tail(self.statistic, self.degrees) if self.degrees else 1.0

    def detectable(self, level: float, power: float = POWER) -> float | None:
        """The least total variation that a test at `level` finds with probability `power`, whatever its shape; None
        where there is nothing to test.

        Any law at total variation d gives a noncentrality of at least 4 N d^2 (Cauchy-Schwarz). What lies within one
        pooled cell is not seen.
        """
        if not self.degrees:
            return None
        critical = _root(lambda x: level - tail(x, self.degrees), self.degrees)
        needed = _root(lambda x: noncentral_tail(critical, self.degrees, x) - power, critical)
        return math.sqrt(needed / (4 * self.num_draws))


def pooled(seen: Sequence[int], expected: Sequence[float]) -> list[tuple[int, float]]:
    """(seen, expected) of cells that expect MIN_EXPECTED each: the rarest join one another, then the rarest left."""
    cells: list[tuple[int, float]] = []
    rest_seen, rest_expected = 0, 0.0
    for count, value in sorted(zip(seen, expected, strict=True), key=lambda cell: cell[1]):
        rest_seen, rest_expected = rest_seen + count, rest_expected + value
        if rest_expected >= MIN_EXPECTED:
            cells.append((rest_seen, rest_expected))
            rest_seen, rest_expected = 0, 0.0
    if rest_expected > 0 and cells:
        cells[-1] = cells[-1][0] + rest_seen, cells[-1][1] + rest_expected
    return cells


def tail(x: float, degrees: int) -> float:
    """P(chi-square with so many degrees >= x)."""
    half = torch.tensor([degrees / 2, max(x, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def noncentral_tail(x: float, degrees: int, noncentrality: float) -> float:
    """P(noncentral chi-square >= x): central ones with Poisson weights."""
    mean = noncentrality / 2
    reach = 12 * math.sqrt(mean) + 40
    terms = torch.arange(max(0, math.floor(mean - reach)), math.ceil(mean + reach), dtype=torch.float64)
    weights = (terms * math.log(mean) - mean - torch.lgamma(terms + 1)).exp() if mean > 0 else (terms == 0).double()
    tails = torch.special.gammaincc(degrees / 2 + terms, torch.full_like(terms, x / 2))
    return float((weights * tails).sum())


def _root(rising: Callable[[float], float], start: float) -> float:
    """Where a rising function crosses zero, from 0 on."""
    low, high = 0.0, max(1.0, start)
    while rising(high) < 0:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
