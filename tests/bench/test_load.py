"""When requests go out, how many at once, and what Ctrl-C leaves."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forerun.bench.client import Outcome
from forerun.bench.datasets import Sample
from forerun.bench.load import LoadOptions, Run, arrivals, run_load
from forerun.errors import ConfigError

SAMPLES = [Sample(str(number)) for number in range(12)]


async def instant(sample: Sample, number: int) -> Outcome:
    await asyncio.sleep(0)
    return Outcome(sample, time.perf_counter(), ended=True)


def test_all_at_once_without_a_rate() -> None:
    assert arrivals(LoadOptions(), 3) == [0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_asked_mean_and_spread(burstiness: float) -> None:
    """A gamma of mean 1/rate and shape b has the coefficient of variation 1/sqrt(b). 20,000 draws know it to 3 %, over
    five standard errors for the burstiest of these."""
    due = arrivals(LoadOptions(request_rate=5, burstiness=burstiness, seed=1), 20_000)
    gaps = np.diff([0.0, *due])
    assert due[-1] == pytest.approx(20_000 / 5)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert (gaps >= 0).all()


def test_arrivals_come_again_with_the_seed() -> None:
    one, two = (arrivals(LoadOptions(request_rate=3, seed=7), 50) for _ in range(2))
    assert one == two
    assert one != arrivals(LoadOptions(request_rate=3, seed=8), 50)


@pytest.mark.parametrize(
    ("strategy", "rate_at"), [("linear", lambda done: 1 + 99 * done), ("exponential", lambda done: 100**done)]
)
def test_a_ramp_goes_from_rate_to_rate(strategy: str, rate_at: Callable[[float], float]) -> None:
    options = LoadOptions(ramp_up_strategy=strategy, ramp_up_start_rps=1, ramp_up_end_rps=100)
    gaps = np.mean([np.diff(arrivals(replace_seed(options, seed), 401)) for seed in range(200)], axis=0)
    for place in (1, 200, 400):  # 200 exponential gaps each: standard error 7 %
        assert 1 / gaps[place - 1] == pytest.approx(rate_at(place / 400), rel=0.3)


def replace_seed(options: LoadOptions, seed: int) -> LoadOptions:
    fields = {name: getattr(options, name) for name in LoadOptions.__dataclass_fields__}
    return LoadOptions(**{**fields, "seed": seed})


@pytest.mark.parametrize("limit", [1, 3, None])
def test_no_more_at_once_than_allowed(limit: int | None) -> None:
    under_way = most = 0

    async def ask(sample: Sample, number: int) -> Outcome:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        outcome = await instant(sample, number)
        under_way -= 1
        return outcome

    run = asyncio.run(run_load(ask, SAMPLES, LoadOptions(max_concurrency=limit)))
    assert most == (limit or len(SAMPLES))
    assert [outcome.sample for outcome in run.outcomes] == SAMPLES


def test_what_happens_between_requests_takes_no_time_of_theirs() -> None:
    async def between(outcome: Outcome) -> None:
        await asyncio.sleep(0.01)

    began = time.perf_counter()
    run = asyncio.run(run_load(instant, SAMPLES, LoadOptions(max_concurrency=1), between=between))
    passed = time.perf_counter() - began
    assert passed >= len(SAMPLES) * 0.01
    assert run.duration_s <= passed - len(SAMPLES) * 0.01


def test_an_interruption_keeps_what_was_measured() -> None:
    async def ask(sample: Sample, number: int) -> Outcome:
        if number >= 5:
            await asyncio.sleep(60)
        return await instant(sample, number)

    async def work() -> Run:
        running = asyncio.create_task(run_load(ask, SAMPLES, LoadOptions(max_concurrency=2), done=done.append))
        while len(done) < 5:
            await asyncio.sleep(0)
        running.cancel()  # what asyncio.run does at Ctrl-C
        return await running

    done: list[Outcome] = []
    run = asyncio.run(work())
    assert run.interrupted
    assert [outcome.sample for outcome in run.outcomes] == SAMPLES[:5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_rate": 0}, "--request-rate must be above 0, or inf, got 0"),
        ({"request_rate": math.nan}, "--request-rate"),
        ({"burstiness": 0}, "--burstiness must be above 0"),
        ({"max_concurrency": 0}, "--max-concurrency must be at least 1"),
        ({"num_warmups": -1}, "--num-warmups"),
        ({"ramp_up_start_rps": 1}, "need --ramp-up-strategy"),
        ({"ramp_up_strategy": "cubic"}, "linear or exponential, got 'cubic'"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1}, "--ramp-up-end-rps, both above 0"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2, "request_rate": 3},
            "exclude each other",
        ),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoadOptions(**options)
