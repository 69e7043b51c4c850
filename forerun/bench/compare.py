"""`bench compare`: what a speculative configuration brings against plain decoding, on this machine and these prompts.

Each arm (plain, and every configuration) is a server of its own, as a user would start it: an engine that merely has
drafting switched off may carry what it needs for drafts, and configurations of different K or rules do not fit into
one. All are started before anything is measured, and wait without work while another is measured.

A *window* is a set of prompts that every arm answers in its turn (plain, A, B, plain, A, B, ...), so that a machine
that slows down slows all of them. Each window has prompts of its own, with the categories in the same shares: the
interval over windows covers the choice of prompts too, and no arm gains by having seen a prompt before. Between levels
of concurrency, where prompts come again, `cache_salt` keeps what was cached apart.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.bench import counters
from forerun.bench.client import Outcome, Target, ask
from forerun.bench.datasets import Sample
from forerun.bench.load import LoadOptions, Run, run_load
from forerun.bench.process import Server
from forerun.bench.results import errors_grouped
from forerun.bench.stats import METHOD, Ratio, paired_ratio
from forerun.errors import ConfigError
from forerun.spec.stats import SpecTotals

PLAIN = "plain"
ALL_PROMPTS = "all"
MIN_WINDOWS = 2


@dataclass(frozen=True, slots=True)
class Arm:
    """A server to be.

    Attributes:
        name: short, for tables.
        speculative_config: as it was given; None: plain decoding.
    """

    name: str
    speculative_config: str | None = None

    def command(self, model: str, arguments: Sequence[str]) -> list[str]:
        """How to start it; `arguments` are those that all arms share."""
        command = [sys.executable, "-m", "forerun", "serve", model, *arguments]
        command += ["--per-request-spec-decode-metrics", "summary", "--disable-uvicorn-access-log"]
        return command + (["--speculative-config", self.speculative_config] if self.speculative_config else [])


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """
    Attributes:
        arms: plain first.
        levels: numbers of requests at once.
        windows: so many sets of prompts.
        target: for all arms; its `base_url` is filled in.
        num_warmups: requests to each arm before each level, not counted; None: as many as the level has at once.
    """

    model: str
    arms: Sequence[Arm]
    levels: Sequence[int]
    windows: Sequence[Sequence[Sample]]
    target: Target
    serve_arguments: Sequence[str] = ()
    num_warmups: int | None = None

    def __post_init__(self) -> None:
        shortest, most = min(map(len, self.windows)), max(self.levels)
        if shortest < most:
            raise ConfigError(
                f"a window has {shortest} prompts, which are never {most} at once: give --num-prompts of at least "
                f"{most * len(self.windows)}, fewer --windows or a lower --max-concurrency"
            )


@dataclass
class Level:
    """What was measured at one number of requests at once: for each arm its windows, in order."""

    concurrency: int
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def outcomes(self, arm: str) -> list[Outcome]:
        return [outcome for run in self.runs[arm] for outcome in run.outcomes]

    @property
    def num_windows(self) -> int:
        """Those that every arm came to the end of."""
        whole = [sum(not run.interrupted for run in runs) for runs in self.runs.values()]
        return min(whole, default=0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One arm against plain, at one level, for one category or for all prompts.

    Attributes:
        ratio: None where there was nothing to compare.
    """

    arm: str
    concurrency: int
    category: str
    ratio: Ratio | None
    plain_rate: float
    rate: float
    spec: SpecTotals | None


def split(samples: Sequence[Sample], num_windows: int, seed: int) -> list[list[Sample]]:
    """The samples dealt into windows category by category, in an order of the seed's within each.

    Raises:
        ConfigError: fewer than two windows, or fewer prompts than windows.
    """
    if num_windows < MIN_WINDOWS:
        raise ConfigError(f"--windows must be at least {MIN_WINDOWS}, got {num_windows}: an interval needs a spread")
    if len(samples) < num_windows:
        raise ConfigError(f"{len(samples)} prompts do not fill {num_windows} windows: give a higher --num-prompts")
    windows: list[list[Sample]] = [[] for _ in range(num_windows)]
    for window, sample in zip(itertools.cycle(windows), sorted(samples, key=lambda s: s.category), strict=False):
        window.append(sample)
    rng = random.Random(seed)
    for window in windows:
        rng.shuffle(window)
    return windows


def start_servers(job: CompareJob, stack: ExitStack, tell: Callable[[str], None]) -> dict[str, Server]:
    """One after the other, so that each finds the memory that it will have. They end with the stack."""
    servers = {}
    for arm in job.arms:
        tell(f"starting {arm.name}")
        servers[arm.name] = stack.enter_context(Server(arm.command(job.model, job.serve_arguments)))
    return servers


async def measure(
    job: CompareJob,
    urls: dict[str, str],
    *,
    done: Callable[[Outcome], None] = lambda outcome: None,
    tell: Callable[[str], None] = lambda doing: None,
) -> list[Level]:
    """All levels, window by window, arm by arm. Ctrl-C ends it with what there is: the last run says so.

    Args:
        urls: of each arm's server.
    """
    levels = []
    for concurrency in job.levels:
        levels.append(level := Level(concurrency, {arm.name: [] for arm in job.arms}))
        load = LoadOptions(max_concurrency=concurrency)
        for arm in job.arms:
            warm = [job.windows[0][0]] * (concurrency if job.num_warmups is None else job.num_warmups)
            run = await _run(job, urls[arm.name], warm, load, "warm-up")
            if run.interrupted:
                return levels
            if warm and not any(outcome.ok for outcome in run.outcomes):
                raise ConfigError(f"{arm.name} answered no warm-up request: {next(iter(errors_grouped(run.outcomes)))}")
        for place, window in enumerate(job.windows):
            for arm in job.arms:
                tell(f"{concurrency} at once, window {place + 1} of {len(job.windows)}: {arm.name}")
                run = await _run(job, urls[arm.name], window, load, f"at-once-{concurrency}", done)
                level.runs[arm.name].append(run)
                if run.interrupted:
                    return levels
    return levels


async def _run(
    job: CompareJob,
    url: str,
    samples: Sequence[Sample],
    load: LoadOptions,
    salt: str,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> Run:
    target = replace(job.target, base_url=url, body={**job.target.body, "cache_salt": salt})
    async with target.connect() as http:  # anew for each window: no connection goes stale while others are measured
        return await run_load(functools.partial(ask, http, target), samples, load, done=done)


def findings(levels: Iterable[Level]) -> list[Finding]:
    """Each configuration against plain at each level: for all prompts by the wall clock, then by category by the time
    of the category's own requests, since those of several categories share a step."""
    found = []
    for level in levels:
        categories = sorted({o.sample.category for o in level.outcomes(PLAIN)} - {""})
        for arm in level.runs:
            if arm != PLAIN:
                found += [_finding(level, arm, category) for category in (ALL_PROMPTS, *categories)]
    return found


def _finding(level: Level, arm: str, category: str) -> Finding:
    baseline, treated = (_rates(level, name, category) for name in (PLAIN, arm))
    pairs = [(a, b) for a, b in zip(treated, baseline, strict=True) if a > 0 and b > 0]
    ratio = paired_ratio([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None
    own = [o for o in level.outcomes(arm) if category in (ALL_PROMPTS, o.sample.category)]
    return Finding(
        arm=arm,
        concurrency=level.concurrency,
        category=category,
        ratio=ratio,
        plain_rate=_mean(baseline),
        rate=_mean(treated),
        spec=counters.from_requests(own),
    )


def _rates(level: Level, arm: str, category: str) -> list[float]:
    """Output tokens per second in each window; 0 where there were none."""
    rates = []
    for run in level.runs[arm][: level.num_windows]:
        own = [o for o in run.outcomes if o.ok and category in (ALL_PROMPTS, o.sample.category)]
        seconds = run.duration_s if category == ALL_PROMPTS else sum(o.latency_s for o in own)
        rates.append(sum(o.num_tokens for o in own) / seconds if own and seconds else 0.0)
    return rates


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def same_texts(levels: Iterable[Level], arm: str) -> tuple[int, int]:
    """(Answers that are plain's, letter by letter; answers that both completed.)"""
    same = total = 0
    for level in levels:
        for ours, plain in zip(level.runs[arm], level.runs[PLAIN], strict=False):
            if not ours.interrupted and not plain.interrupted:
                both = [(a, b) for a, b in zip(ours.outcomes, plain.outcomes, strict=True) if a.ok and b.ok]
                total += len(both)
                same += sum(a.text == b.text for a, b in both)
    return same, total


def verdict(found: Sequence[Finding]) -> list[str]:
    """In words: where each configuration helps, where it does not, and where the intervals do not let one say."""
    lines = []
    for whole in (finding for finding in found if finding.category == ALL_PROMPTS):
        lines.append(f"{whole.arm}, {_at_once(whole.concurrency)}: {_sentence(whole)}")
        parts = [f for f in found if (f.arm, f.concurrency) == (whole.arm, whole.concurrency) and f is not whole]
        for says, words in ((1, "helps on"), (-1, "costs on"), (0, "the interval does not let one say on")):
            named = [f"{f.category} ({_interval(f.ratio)})" for f in parts if f.ratio and f.ratio.says == says]
            if named:
                lines.append(f"  {words} {', '.join(named)}")
        if absent := [f.category for f in parts if f.ratio is None]:
            lines.append(f"  not measured on {', '.join(absent)}")
    judged = sum(f.ratio is not None and f.ratio.low is not None for f in found)
    if judged > 1:
        lines.append(f"{METHOD}. Of {judged} such intervals about {judged * 0.05:.1f} miss the truth by chance.")
    return lines


def _at_once(concurrency: int) -> str:
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests at once"


def _sentence(finding: Finding) -> str:
    ratio = finding.ratio
    if ratio is None:
        return "nothing was measured to compare."
    figure = f"{ratio.value:.2f} times plain's tokens per second ({_interval(ratio)}, {ratio.num_windows} windows)"
    if finding.spec is not None and finding.spec.num_drafts == 0:
        return f"nothing was drafted, so nothing is gained: {figure}."
    if ratio.low is None:
        return f"{figure}: one window gives no interval, so it does not let one say whether it helps."
    return {
        1: f"it helps: {figure}.",
        -1: f"it does not help, it costs: {figure}.",
        0: f"the interval does not let one say whether it helps: {figure}.",
    }[ratio.says]


def _interval(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}, no interval" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"


def as_object(job: CompareJob, levels: Sequence[Level], found: Sequence[Finding]) -> dict[str, Any]:
    """The result as JSON."""
    return {
        "model": job.model,
        "arms": {arm.name: arm.speculative_config for arm in job.arms},
        "interval": METHOD,
        "num_prompts": sum(map(len, job.windows)),
        "windows": len(job.windows),
        "interrupted": any(run.interrupted for level in levels for runs in level.runs.values() for run in runs),
        "levels": [
            {
                "max_concurrency": level.concurrency,
                "output_throughput": {arm: _rates(level, arm, ALL_PROMPTS) for arm in level.runs},
                "error_counts": {arm: errors_grouped(level.outcomes(arm)) for arm in level.runs},
            }
            for level in levels
        ],
        "identical_texts": {arm.name: same_texts(levels, arm.name) for arm in job.arms[1:]},
        "findings": [_finding_object(finding) for finding in found],
        "verdict": verdict(found),
    }


def _finding_object(finding: Finding) -> dict[str, Any]:
    ratio = finding.ratio
    return {
        "arm": finding.arm,
        "max_concurrency": finding.concurrency,
        "category": finding.category,
        "ratio": None if ratio is None else ratio.value,
        "interval": None if ratio is None or ratio.low is None else [ratio.low, ratio.high],
        "windows": 0 if ratio is None else ratio.num_windows,
        "plain_tokens_per_s": finding.plain_rate,
        "tokens_per_s": finding.rate,
        **({} if finding.spec is None else counters.acceptance(finding.spec)),
    }
