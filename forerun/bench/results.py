"""From outcomes to figures: vLLM's result fields, and ours under `forerun`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.bench.client import Outcome
from forerun.bench.counters import acceptance
from forerun.bench.load import LoadOptions, Run
from forerun.errors import ConfigError
from forerun.spec.stats import SpecTotals

MS = 1e3
# name of a metric -> what it is, as a heading
METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Inter-token latency (between chunks)",
    "e2el": "End-to-end latency",
    "client_queue_time": "Time in the client's queue",
    "e2el_including_client_queue": "End-to-end latency, client's queue included",
}
DEFAULT_METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Which figures.

    Attributes:
        metrics: names in `METRICS`.
        percentiles: 0 to 100.
        goodput: metric -> most milliseconds; {} for no goodput.
    """

    metrics: tuple[str, ...] = DEFAULT_METRICS
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(f"--percentile-metrics {name!r} is not known: use {', '.join(METRICS)}")
        for value in self.percentiles:
            if not 0 <= value <= 100:
                raise ConfigError(f"--metric-percentiles must be from 0 to 100, got {value:g}")
        for name, limit in self.goodput.items():
            if name not in GOODPUT_METRICS:
                raise ConfigError(f"--goodput {name!r} is not known: use {', '.join(GOODPUT_METRICS)}")
            if not limit >= 0:
                raise ConfigError(f"--goodput {name} must be milliseconds of at least 0, got {limit:g}")


def values_s(outcomes: Iterable[Outcome], metric: str) -> list[float]:
    """All observations of a metric over completed requests, seconds; one a chunk for `itl`, else at most one a
    request."""
    done = [outcome for outcome in outcomes if outcome.ok]
    if metric == "itl":
        return [gap for outcome in done for gap in outcome.itls_s]
    return [value for outcome in done if (value := _value_s(outcome, metric)) is not None]


def _value_s(outcome: Outcome, metric: str) -> float | None:
    return {
        "ttft": outcome.ttft_s,
        "tpot": outcome.tpot_s,
        "e2el": outcome.latency_s,
        "client_queue_time": outcome.queue_s,
        "e2el_including_client_queue": outcome.queue_s + outcome.latency_s,
    }[metric]


def percentile_name(percentile: float) -> str:
    return f"p{percentile:g}"


def spread_ms(values: Sequence[float], percentiles: Iterable[float]) -> dict[str, float]:
    """mean, median, std and percentiles (linear between observations) in milliseconds; zeros where there are none."""
    array = np.asarray(values or [0.0]) * MS
    figures = {"mean": array.mean(), "median": np.median(array), "std": array.std()}
    figures |= {percentile_name(p): np.percentile(array, p) for p in percentiles}
    return {name: float(value) for name, value in figures.items()}


def is_good(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    """Whether a completed request kept every limit. What it does not have (no text, one token) it does not miss."""
    return outcome.ok and all((_value_s(outcome, name) or 0.0) * MS <= limit for name, limit in limits_ms.items())


def most_at_once(outcomes: Iterable[Outcome]) -> int:
    """The most requests that were under way at one time."""
    changes = [(o.start, 1) for o in outcomes] + [(o.start + o.latency_s, -1) for o in outcomes]
    under_way = np.cumsum([change for _, change in sorted(changes)])
    return int(under_way.max(initial=0))


def chunks_per_second(outcomes: Iterable[Outcome]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Chunks that arrived in each second since the first request was sent."""
    done = [outcome for outcome in outcomes if outcome.ok and outcome.ttft_s is not None]
    if not done:
        return np.zeros(0, dtype=np.int64)
    start = min(outcome.start for outcome in done)
    times = [o.start - start + np.cumsum([o.ttft_s, *o.itls_s]) for o in done]
    return np.bincount(np.concatenate(times).astype(np.int64))


def header_fields(
    load: LoadOptions, *, backend: str, model: str, tokenizer: str, num_prompts: int, label: str | None = None
) -> dict[str, Any]:
    """What was asked for."""
    return {
        "endpoint_type": backend,
        "backend": backend,
        "label": label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }


def result_fields(run: Run, options: ReportOptions) -> dict[str, Any]:
    """The body of a result: counts, throughput, and the spread of each metric."""
    done = [outcome for outcome in run.outcomes if outcome.ok]
    duration = max(run.duration_s, 1e-9)
    num_input = sum(outcome.num_prompt_tokens or 0 for outcome in done)
    num_output = sum(outcome.num_tokens for outcome in done)
    good = sum(is_good(outcome, options.goodput) for outcome in done)
    result: dict[str, Any] = {
        "duration": run.duration_s,
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if options.goodput else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": float(chunks_per_second(done).max(initial=0)),
        "max_concurrent_requests": most_at_once(run.outcomes),
    }
    for metric in options.metrics:
        for name, value in spread_ms(values_s(done, metric), options.percentiles).items():
            result[f"{name}_{metric}_ms"] = value
    return result


def detail_fields(run: Run) -> dict[str, Any]:
    """One entry a request, in the order in which they were to be sent; seconds."""
    outcomes = run.outcomes
    details: dict[str, Any] = {
        "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.num_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "latencies": [outcome.latency_s for outcome in outcomes],
        "queue_times": [outcome.queue_s for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
    if any("queue_time_ms" in outcome.metrics for outcome in outcomes):
        for name, key in (("server_queue_times", "queue_time_ms"), ("server_ttfts", "time_to_first_token_ms")):
            times = [outcome.metrics.get(key) for outcome in outcomes]
            details[name] = [None if value is None else value / MS for value in times]
    return details


def errors_grouped(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Message -> how often, the most frequent first."""
    return dict(Counter(outcome.error for outcome in outcomes if not outcome.ok).most_common())


def by_category(
    outcomes: Sequence[Outcome], options: ReportOptions, accepted: Mapping[str, SpecTotals | None]
) -> dict[str, dict[str, Any]]:
    """Counts, latencies and acceptance of each category of prompts; {} where the dataset has none.

    `output_tokens_per_request_s` is tokens by the time of their requests, since requests of other categories share the
    wall clock.
    """
    rows: dict[str, dict[str, Any]] = {}
    for category in sorted({outcome.sample.category for outcome in outcomes} - {""}):
        own = [outcome for outcome in outcomes if outcome.sample.category == category]
        done = [outcome for outcome in own if outcome.ok]
        num_output = sum(outcome.num_tokens for outcome in done)
        seconds = sum(outcome.latency_s for outcome in done)
        row: dict[str, Any] = {
            "completed": len(done),
            "failed": len(own) - len(done),
            "total_output_tokens": num_output,
            "output_tokens_per_request_s": num_output / seconds if seconds else 0.0,
        }
        for metric in options.metrics:
            spread = spread_ms(values_s(done, metric), options.percentiles)
            row |= {f"{name}_{metric}_ms": value for name, value in spread.items()}
        if (spec := accepted.get(category)) is not None:
            row |= acceptance(spec)
        rows[category] = row
    return rows


def now_text() -> str:
    return time.strftime("%Y%m%d-%H%M%S")
