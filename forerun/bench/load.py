"""When requests are sent: arrival times, how many at once, warm-up; and what is kept when somebody presses Ctrl-C."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from forerun.bench.client import Outcome
from forerun.bench.datasets import Sample
from forerun.errors import ConfigError

RAMPS = ("linear", "exponential")
Ask = Callable[[Sample, int], Awaitable[Outcome]]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Fields are named after their flags.

    Attributes:
        request_rate: requests per second; inf sends all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less is burstier.
        max_concurrency: most requests under way; None for no limit.
        ramp_up_strategy: the rate goes from `ramp_up_start_rps` to `ramp_up_end_rps` over the run.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    num_warmups: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate must be above 0, or inf, got {self.request_rate}")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise ConfigError(f"--burstiness must be above 0, got {self.burstiness}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups must be at least 0, got {self.num_warmups}")
        self._check_ramp()

    def _check_ramp(self) -> None:
        rates = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if any(rate is not None for rate in rates):
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
            return
        if self.ramp_up_strategy not in RAMPS:
            raise ConfigError(f"--ramp-up-strategy must be {' or '.join(RAMPS)}, got {self.ramp_up_strategy!r}")
        if any(rate is None or not (rate > 0 and math.isfinite(rate)) for rate in rates):
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0")
        if math.isfinite(self.request_rate):
            raise ConfigError("--ramp-up-strategy and --request-rate exclude each other: leave one out")


def arrivals(options: LoadOptions, count: int) -> list[float]:
    """Seconds from the start at which each request is due, ascending.

    With a fixed rate they are stretched so that the last is due after exactly count / rate, as vLLM's client does: what
    was asked for is what is offered, for few requests too.
    """
    if options.ramp_up_strategy is None and math.isinf(options.request_rate):
        return [0.0] * count
    rng = random.Random(options.seed)
    shape = options.burstiness
    gaps = [rng.gammavariate(shape, 1 / shape) / rate_at(options, i / max(1, count - 1)) for i in range(count)]
    due = list(itertools.accumulate(gaps))
    if options.ramp_up_strategy is None and due[-1] > 0:
        due = [time_s * count / options.request_rate / due[-1] for time_s in due]
    return due


def rate_at(options: LoadOptions, progress: float) -> float:
    """Requests per second when so much of the run is over, 0 to 1."""
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None or start is None or end is None:
        return options.request_rate
    if options.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)


@dataclass
class Run:
    """What was measured.

    Attributes:
        duration_s: from the start to the last answer, less the time that `between` took.
        interrupted: somebody pressed Ctrl-C; requests under way then are not among the outcomes.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    duration_s: float = 0.0
    interrupted: bool = False


async def run_load(
    ask: Ask,
    samples: Sequence[Sample],
    options: LoadOptions,
    *,
    done: Callable[[Outcome], None] = lambda outcome: None,
    between: Callable[[Outcome], Awaitable[None]] | None = None,
) -> Run:
    """Send all samples as the options say. Outcomes are in the samples' order.

    Args:
        done: called after each request.
        between: awaited after each request of a run that makes one at a time, before the next is sent. Its time does
            not count.
    """
    places = asyncio.Semaphore(options.max_concurrency or len(samples) or 1)
    finished: dict[int, Outcome] = {}
    paused_s = 0.0

    async def one(number: int, sample: Sample) -> None:
        nonlocal paused_s
        arrived = time.perf_counter()
        async with places:
            queue_s = time.perf_counter() - arrived
            outcome = await ask(sample, number)
            outcome.queue_s = queue_s
            finished[number] = outcome
            done(outcome)
            if between is not None:
                began = time.perf_counter()
                await between(outcome)
                paused_s += time.perf_counter() - began

    run = Run()
    tasks: list[asyncio.Task[None]] = []
    start = time.perf_counter()
    try:
        for number, (sample, due) in enumerate(zip(samples, arrivals(options, len(samples)), strict=True)):
            if (wait := start + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(number, sample)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        run.interrupted = True
        if (current := asyncio.current_task()) is not None:
            current.uncancel()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    run.duration_s = time.perf_counter() - start - paused_s
    run.outcomes = [finished[number] for number in sorted(finished)]
    return run
