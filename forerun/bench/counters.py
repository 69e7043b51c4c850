"""The server's own counters, read from /metrics before and after: what speculation did in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from forerun.bench.client import Outcome
from forerun.bench.extras import extra
from forerun.spec.stats import SpecTotals

if TYPE_CHECKING:
    import httpx

PREFIX = "vllm:spec_decode_num_"
GENERATED = "vllm:generation_tokens_total"


@dataclass
class Counters:
    """One reading.

    Attributes:
        spec: None where the server does not count drafts.
        generation_tokens: None where it does not count tokens.
    """

    spec: SpecTotals | None = None
    generation_tokens: int | None = None


@dataclass
class CategoryCounters:
    """What /metrics said between the requests of a run that makes one at a time."""

    before: SpecTotals
    by_category: dict[str, SpecTotals] = field(default_factory=dict)

    def note(self, category: str, now: SpecTotals) -> None:
        """All since the last reading was for a request of this category."""
        add(self.by_category.setdefault(category, SpecTotals()), subtract(now, self.before))
        self.before = now


def parse(text: str) -> Counters:
    """Sums over engines and models. Raises ValueError for what is not Prometheus' text format."""
    counters = Counters()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            value = int(sample.value) if sample.name.endswith("_total") else 0
            if sample.name == GENERATED:
                counters.generation_tokens = (counters.generation_tokens or 0) + value
            elif sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                counters.spec = counters.spec or SpecTotals()
                _count(counters.spec, sample.name[len(PREFIX) : -len("_total")], sample.labels, value)
    return counters


def _count(spec: SpecTotals, name: str, labels: dict[str, str], value: int) -> None:
    if name == "drafts":
        spec.num_drafts += value
    elif name == "draft_tokens":
        spec.num_draft_tokens += value
    elif name == "accepted_tokens":
        spec.num_accepted_tokens += value
    elif name == "accepted_tokens_per_pos":
        position = int(labels["position"])
        counts = spec.num_accepted_tokens_per_pos
        counts.extend([0] * (position + 1 - len(counts)))
        counts[position] += value


async def read(http: httpx.AsyncClient) -> Counters:
    """What /metrics says; nothing where there is no such page or it cannot be read."""
    httpx = extra("httpx", "forerun bench")
    try:
        response = await http.get("/metrics")
        return parse(response.text) if response.status_code == 200 else Counters()
    except (httpx.HTTPError, ValueError, KeyError):
        return Counters()


def add(into: SpecTotals, other: SpecTotals, sign: int = 1) -> None:
    into.num_drafts += sign * other.num_drafts
    into.num_draft_tokens += sign * other.num_draft_tokens
    into.num_accepted_tokens += sign * other.num_accepted_tokens
    counts = into.num_accepted_tokens_per_pos
    counts.extend([0] * (len(other.num_accepted_tokens_per_pos) - len(counts)))
    for position, count in enumerate(other.num_accepted_tokens_per_pos):
        counts[position] += sign * count


def subtract(now: SpecTotals, before: SpecTotals) -> SpecTotals:
    """What was counted in between."""
    difference = SpecTotals()
    add(difference, now)
    add(difference, before, -1)
    return difference


def from_requests(outcomes: Iterable[Outcome]) -> SpecTotals | None:
    """The sum of what the server said of each request; None where it left a completed one out."""
    totals = SpecTotals()
    for outcome in outcomes:
        if not outcome.ok:
            continue
        if (spec := outcome.speculation) is None:
            return None
        steps, drafted, accepted = (
            spec[name] for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        )
        # of exactly n accepted tokens, each of the first n positions was accepted
        histogram = spec.get("acceptance_histogram") or []
        positions = [sum(histogram[place + 1 :]) for place in range(len(histogram) - 1)]
        add(totals, SpecTotals(steps, drafted, accepted, positions))
    return totals


def acceptance(spec: SpecTotals) -> dict[str, Any]:
    """The speculative block of a result, in vLLM's names; rates are 0 where nothing was drafted."""
    drafts = spec.num_drafts
    return {
        "spec_decode_acceptance_rate": 100 * spec.num_accepted_tokens / max(1, spec.num_draft_tokens),
        "spec_decode_acceptance_length": 1 + spec.num_accepted_tokens / max(1, drafts),
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": spec.num_draft_tokens,
        "spec_decode_accepted_tokens": spec.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": [
            count / max(1, drafts) for count in spec.num_accepted_tokens_per_pos
        ],
    }
