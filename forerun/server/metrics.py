"""Prometheus metrics under the names that vLLM's dashboards read, and ours beside them under `forerun:`.

Counters and gauges come from the core's `EngineStats` when they are asked for; what only the front sees (times, finish
reasons) is observed as outputs arrive. Each app has its own registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from forerun.engine.client import EngineClient, RunningRequest
from forerun.engine.messages import EngineStats, RequestOutput
from forerun.request import FinishReason
from forerun.spec.stats import SpecTotals

LABELS = ("model_name", "engine")
REJECTIONS = ("queue_full", "too_many_prompts")
ENGINE = "0"

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKENS = (1, 8, *(2**power for power in range(4, 15)))
LATENCY_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


def length_buckets(longest: int) -> list[int]:
    """1 2 5 10 20 50 ... up to `longest`."""
    return [value for power in range(12) for value in (10**power, 2 * 10**power, 5 * 10**power) if value <= longest]


class ServerMetrics:
    """All metrics of one app; also the engine client's observer.

    Attributes:
        num_finished: requests that ended, for whatever reason.
    """

    def __init__(self, model_name: str, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.num_finished = 0
        self._model_name = model_name
        lengths = length_buckets(client.info.max_model_len)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        self._gap = self._histogram("inter_token_latency_seconds", "Gap between outputs of a request.", TOKEN_GAP_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "(last - first token) / (tokens - 1).", TOKEN_GAP_S
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", LATENCY_S)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step.", LATENCY_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", LATENCY_S)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", LATENCY_S)
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token.", LATENCY_S)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._output_tokens = self._histogram("request_generation_tokens", "Output tokens of a request.", lengths)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", lengths)
        self._preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a request.", (1, 2, 3, 4, 5, 10, 20)
        )
        self._most_tokens = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice.", lengths
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not in the cache.", lengths
        )
        self._number = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step: rows computed, without drafted ones that fell.", STEP_TOKENS
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests turned away before they ran, by reason.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        for reason in REJECTIONS:
            self._rejections.labels(model_name, reason)
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {reason: success.labels(model_name, ENGINE, reason.value) for reason in FinishReason}
        self.registry.register(EngineCollector(model_name, client))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, LABELS, registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name, ENGINE)

    def output(self, request: RunningRequest, output: RequestOutput, now: float) -> None:
        if not output.token_ids:
            return
        if request.last_output is None:
            self._first_token.observe(now - request.arrival)
        else:
            self._gap.observe(now - request.last_output)

    def rejected(self, reason: str, number: int) -> None:
        self._rejections.labels(self._model_name, reason).inc(number)

    def stepped(self, before: EngineStats, now: EngineStats) -> None:
        if now.num_steps == before.num_steps:
            return
        fallen = now.spec.num_draft_tokens - now.spec.num_accepted_tokens
        fallen -= before.spec.num_draft_tokens - before.spec.num_accepted_tokens
        self._step_tokens.observe(now.num_rows - before.num_rows - fallen)

    def finished(self, request: RunningRequest, reason: FinishReason, output: RequestOutput | None) -> None:
        self.num_finished += 1
        self._success[reason].inc()
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._prompt_tokens.observe(len(request.new.prompt_token_ids))
        self._output_tokens.observe(request.num_tokens)
        if request.siblings.num_left == 0:
            self._most_tokens.observe(request.siblings.longest)
            self._number.observe(request.siblings.number)
        if output is not None:
            self._computed.observe(len(request.new.prompt_token_ids) - output.num_cached_tokens)
        if request.new.params.max_tokens is not None:
            self._max_tokens.observe(request.new.params.max_tokens)
        self._observe_times(request, output)

    def _observe_times(self, request: RunningRequest, output: RequestOutput | None) -> None:
        if request.first_output is not None and request.last_output is not None:
            self._latency.observe(request.last_output - request.arrival)
            if request.num_tokens > 1:
                self._per_token.observe((request.last_output - request.first_output) / (request.num_tokens - 1))
        measured = output.metrics if output is not None else None
        if measured is not None:
            self._queue.observe(measured.queue_time_s)
            self._prefill.observe(measured.time_to_first_token_s)
            self._decode.observe(measured.generation_time_s)
            self._inference.observe(measured.time_to_first_token_s + measured.generation_time_s)
            self._preemptions.observe(measured.num_preemptions)


class EngineCollector(Collector):
    """The core's own figures, read at each scrape."""

    def __init__(self, model_name: str, client: EngineClient) -> None:
        self._labels = (model_name, ENGINE)
        self._client = client

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        if self._client.info.speculative_config is not None:
            yield from self._speculation(stats)
        yield from self._own(stats)

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering does not read an engine that is not there yet

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.num_requests_running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", stats.num_requests_waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests that wait, by reason.", labels=(*LABELS, "reason")
        )
        reasons.add_metric((*self._labels, "capacity"), stats.num_requests_waiting)
        reasons.add_metric((*self._labels, "deferred"), 0)  # nobody waits for anything else
        yield reasons
        yield self._gauge("kv_cache_usage_perc", "KV blocks held by requests, 0 to 1.", stats.kv_cache_usage)
        names, values = zip(*self._cache_config().items(), strict=True)
        info = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=("engine", *names))
        info.add_metric((ENGINE, *values), 1)
        yield info

    def _cache_config(self) -> dict[str, str]:
        info, config = self._client.info, self._client.config
        return {
            "model_name": self._labels[0],
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
            "cache_dtype": info.dtype,
        }

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Prompt tokens, cached ones included.", stats.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens taken from the cache.", stats.prompt_tokens_cached)
        sources = {
            "local_compute": stats.prompt_tokens - stats.prompt_tokens_cached,
            "local_cache_hit": stats.prompt_tokens_cached,
        }
        yield self._by("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source", sources)
        cached = {"local_cache_hit": stats.prompt_tokens_cached}
        yield self._by("vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by source.", "source", cached)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits)

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        spec = stats.spec
        yield self._counter("spec_decode_num_drafts", "(request, step) pairs with a draft.", spec.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", spec.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Accepted tokens.", spec.num_accepted_tokens)
        # A series for each position that may be drafted, from the start, so that rates have something to start from.
        counts = padded(spec.num_accepted_tokens_per_pos, self._client.info.num_spec_tokens)
        positions = {str(position): count for position, count in enumerate(counts)}
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._by(name, "Steps in which the position was accepted.", "position", positions)
        yield self._counter(
            "spec_decode_num_loosely_accepted_tokens",
            "Accepted tokens that the target's own rule had rejected: lossy rules only.",
            spec.num_loosely_accepted_tokens,
            "forerun",
        )
        info, labels = self._client.info, (*LABELS, "rejection_sample_method", "lossless")
        rule = GaugeMetricFamily("forerun:spec_decode_rule_info", "The server's rule and its promise.", labels=labels)
        rule.add_metric((*self._labels, info.rejection_sample_method, info.lossless), 1)
        yield rule

    def _own(self, stats: EngineStats) -> Iterator[Metric]:
        restarts = self._client.num_restarts
        yield self._gauge("engine_healthy", "1 while requests are taken, else 0.", self._client.healthy, "forerun")
        yield self._counter("engine_restarts", "Engines started in the place of dead ones.", restarts, "forerun")
        yield self._counter("num_steps", "Steps of the engine.", stats.num_steps, "forerun")
        ahead = stats.num_steps_ahead
        yield self._counter("num_steps_ahead", "Of them, launched before the last was read.", ahead, "forerun")
        yield self._counter("num_rows", "Rows through the target, drafted included.", stats.num_rows, "forerun")
        yield self._counter("step_time_seconds", "Time in steps.", stats.step_time_s, "forerun")
        yield self._counter("draft_time_seconds", "Of it, time spent drafting.", stats.draft_time_s, "forerun")
        yield self._counter(
            "forward_time_seconds", "Of it, time in the target's pass.", stats.forward_time_s, "forerun"
        )
        yield self._counter("verify_time_seconds", "Of it, time judging drafts.", stats.verify_time_s, "forerun")
        yield self._gauge("proposer_state_bytes", "State that the proposer holds.", stats.proposer_bytes, "forerun")
        if stats.not_drafted:
            text = "(request, step) pairs that decoded without a draft, by reason."
            yield self._by("forerun:spec_decode_not_drafted", text, "reason", stats.not_drafted)
        if stats.draft_time_by_proposer:
            times = stats.draft_time_by_proposer
            yield self._by("forerun:proposer_time_seconds", "Time spent drafting, by proposer.", "proposer", times)
        if not (stats.spec_by_proposer or stats.draft_time_by_proposer):
            return
        for name, text in (
            ("num_drafts", "(request, step) pairs with a draft"),
            ("num_draft_tokens", "Drafted tokens"),
            ("num_accepted_tokens", "Accepted tokens"),
        ):
            known = dict.fromkeys(stats.draft_time_by_proposer, 0)
            values = known | {proposer: getattr(totals, name) for proposer, totals in stats.spec_by_proposer.items()}
            yield self._by(f"forerun:spec_decode_{name}", f"{text}, by proposer.", "proposer", values)

    def _gauge(self, name: str, text: str, value: float, family: str = "vllm") -> Metric:
        gauge = GaugeMetricFamily(f"{family}:{name}", text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _counter(self, name: str, text: str, value: float, family: str = "vllm") -> Metric:
        counter = CounterMetricFamily(f"{family}:{name}", text, labels=LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _by(self, name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            counter.add_metric((*self._labels, key), value)
        return counter


def padded(counts: Sequence[int], length: int) -> list[int]:
    return [*counts, *[0] * (length - len(counts))]


def spec_difference(now: SpecTotals, before: SpecTotals, num_spec_tokens: int) -> SpecTotals:
    """What happened between two readings of the counters."""
    length = max(num_spec_tokens, len(now.num_accepted_tokens_per_pos))
    pairs = zip(
        padded(now.num_accepted_tokens_per_pos, length), padded(before.num_accepted_tokens_per_pos, length), strict=True
    )
    return SpecTotals(
        num_drafts=now.num_drafts - before.num_drafts,
        num_draft_tokens=now.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=now.num_accepted_tokens - before.num_accepted_tokens,
        num_accepted_tokens_per_pos=[a - b for a, b in pairs],
        num_loosely_accepted_tokens=now.num_loosely_accepted_tokens - before.num_loosely_accepted_tokens,
    )
