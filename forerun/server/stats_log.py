"""The periodic lines, in the form that vLLM's users and their tools know."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from forerun.engine.client import EngineClient
from forerun.engine.messages import EngineStats
from forerun.server.metrics import ServerMetrics, spec_difference
from forerun.spec.stats import SpecTotals

logger = logging.getLogger("forerun.stats")

HIT_RATE_REQUESTS = 1000  # the prefix cache's hit rate is over about as many requests


@dataclass(slots=True)
class HitInterval:
    requests: int
    queries: int
    hits: int


class StatsLog:
    """Turns differences between readings into lines.

    Args:
        interval_s: seconds between lines.
    """

    def __init__(self, client: EngineClient, metrics: ServerMetrics, interval_s: float) -> None:
        self._client = client
        self._metrics = metrics
        self._interval_s = interval_s
        self._time = self._spec_time = time.monotonic()
        self._stats = client.stats()
        self._spec = self._stats.spec
        self._finished = metrics.num_finished
        self._hits: deque[HitInterval] = deque()
        self._idle_intervals = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.log(time.monotonic())

    def log(self, now: float) -> None:
        """Say what happened since the last call: INFO, or DEBUG once nothing happened twice in a row."""
        stats, before, elapsed = self._client.stats(), self._stats, now - self._time
        idle = stats.num_requests_running + stats.num_requests_waiting == 0 and stats.num_steps == before.num_steps
        self._idle_intervals = self._idle_intervals + 1 if idle else 0
        self._note_hits(stats, before)
        logger.log(
            logging.DEBUG if self._idle_intervals >= 2 else logging.INFO, self._engine_line(stats, before, elapsed)
        )
        self._log_speculation(stats.spec, now)
        self._time, self._stats = now, stats

    def _engine_line(self, stats: EngineStats, before: EngineStats, elapsed: float) -> str:
        computed = stats.prompt_tokens - stats.prompt_tokens_cached
        computed_before = before.prompt_tokens - before.prompt_tokens_cached
        parts = [
            f"Avg prompt throughput: {(computed - computed_before) / elapsed:.1f} tokens/s",
            f"Avg generation throughput: {(stats.generation_tokens - before.generation_tokens) / elapsed:.1f} tokens/s",
            f"Running: {stats.num_requests_running} reqs",
            f"Waiting: {stats.num_requests_waiting} reqs",
            # "GPU" on a CPU as well: it is what tools look for.
            f"GPU KV cache usage: {100 * stats.kv_cache_usage:.1f}%",
        ]
        if self._client.config.enable_prefix_caching:
            parts.append(f"Prefix cache hit rate: {100 * self._hit_rate():.1f}%")
        return "Engine 000: " + ", ".join(parts)

    def _note_hits(self, stats: EngineStats, before: EngineStats) -> None:
        finished = self._metrics.num_finished
        queries = stats.prefix_cache_queries - before.prefix_cache_queries
        hits = stats.prefix_cache_hits - before.prefix_cache_hits
        if queries or finished > self._finished:
            self._hits.append(HitInterval(finished - self._finished, queries, hits))
        self._finished = finished
        while sum(i.requests for i in self._hits) - (self._hits[0].requests if self._hits else 0) >= HIT_RATE_REQUESTS:
            self._hits.popleft()

    def _hit_rate(self) -> float:
        queries = sum(i.queries for i in self._hits)
        return sum(i.hits for i in self._hits) / queries if queries else 0.0

    def _log_speculation(self, totals: SpecTotals, now: float) -> None:
        spec = spec_difference(totals, self._spec, self._client.info.num_spec_tokens)
        if spec.num_drafts == 0:
            return
        logger.info(spec_line(spec, now - self._spec_time))
        self._spec, self._spec_time = totals, now


def spec_line(spec: SpecTotals, elapsed: float) -> str:
    """What speculation did in `elapsed` seconds; `num_drafts` is not 0."""
    rates = ", ".join(f"{count / spec.num_drafts:.3f}" for count in spec.num_accepted_tokens_per_pos)
    rate = 100 * spec.num_accepted_tokens / spec.num_draft_tokens if spec.num_draft_tokens else float("nan")
    loose = spec.num_loosely_accepted_tokens
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + spec.num_accepted_tokens / spec.num_drafts:.2f}, "
        f"Accepted throughput: {spec.num_accepted_tokens / elapsed:.2f} tokens/s, "
        f"Drafted throughput: {spec.num_draft_tokens / elapsed:.2f} tokens/s, "
        f"Accepted: {spec.num_accepted_tokens} tokens, "
        f"Drafted: {spec.num_draft_tokens} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {rate:.1f}%" + (f", Loosely accepted: {loose} tokens" if loose else "")
    )
