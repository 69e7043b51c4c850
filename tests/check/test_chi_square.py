"""The test's own figures: tails, pooling, false alarms and power."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.check.chi_square import MIN_EXPECTED, ChiSquare, noncentral_tail, pooled, tail

LAW = [0.4, 0.2, 0.15, 0.1, 0.08, 0.05, 0.01, 0.006, 0.004]


@pytest.mark.parametrize(
    ("x", "degrees", "expected"),
    [(3.8415, 1, 0.05), (18.3070, 10, 0.05), (29.5883, 10, 0.001), (149.4493, 100, 0.001)],  # from printed tables
)
def test_tails_are_those_of_the_tables(x: float, degrees: int, expected: float) -> None:
    assert tail(x, degrees) == pytest.approx(expected, rel=1e-4)
    assert noncentral_tail(x, degrees, 0.0) == pytest.approx(expected, rel=1e-4)


def test_the_noncentral_tail_is_that_of_shifted_normals() -> None:
    rng, shift, degrees, x = random.Random(0), 2.0, 4, 12.0
    draws = 20_000
    over = 0
    for _ in range(draws):
        first = rng.gauss(shift, 1.0)
        over += first * first + sum(rng.gauss(0.0, 1.0) ** 2 for _ in range(degrees - 1)) >= x
    assert over / draws == pytest.approx(noncentral_tail(x, degrees, shift**2), abs=0.012)  # four standard errors


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 60)), max_size=20))
def test_pooling_loses_nothing(cells: list[tuple[int, float]]) -> None:
    seen, expected = [c for c, _ in cells], [e for _, e in cells]
    found = pooled(seen, expected)
    assert all(value >= MIN_EXPECTED for _, value in found)
    if sum(expected) > MIN_EXPECTED + 1e-6:
        assert sum(count for count, _ in found) == sum(seen)
        assert sum(value for _, value in found) == pytest.approx(sum(expected))


def sample(rng: random.Random, law: list[float], count: int) -> list[int]:
    seen = [0] * len(law)
    for place in rng.choices(range(len(law)), law, k=count):
        seen[place] += 1
    return seen


def test_false_alarms_and_power_are_as_stated() -> None:
    """At a level of 5 %, over 400 samples: alarms within four standard errors; a law at the distance that is said to be
    detectable is found in 99 % or more."""
    rng, level, count, repeats = random.Random(1), 0.05, 600, 400
    probe = ChiSquare()
    probe.add([round(p * count) for p in LAW], LAW)
    distance = probe.detectable(level)
    assert distance is not None
    other = [LAW[0] - distance, LAW[1] + distance, *LAW[2:]]
    alarms = found = 0
    for _ in range(repeats):
        right, wrong = ChiSquare(), ChiSquare()
        right.add(sample(rng, LAW, count), LAW)
        wrong.add(sample(rng, other, count), LAW)
        alarms += right.p_value < level
        found += wrong.p_value < level
    assert 0.006 < alarms / repeats < 0.094
    assert found / repeats > 0.97


def test_what_cannot_be_is_enough() -> None:
    test = ChiSquare()
    test.add([50, 50], [0.5, 0.5], impossible=1)
    assert test.p_value == 0.0


def test_one_cell_tests_nothing() -> None:
    test = ChiSquare()
    test.add([100], [1.0])
    assert (test.degrees, test.p_value, test.detectable(1e-4)) == (0, 1.0, None)


def test_samples_add_up() -> None:
    one, other, both = ChiSquare(), ChiSquare(), ChiSquare()
    for test in (one, both):
        test.add([60, 40], [0.5, 0.5])
    for test in (other, both):
        test.add([20, 30, 50], [0.2, 0.3, 0.5])
    one.join(other)
    assert one == both
    assert one.degrees == 3
