"""What the metrics and log lines say about speculation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from forerun.engine.plan import Plan
    from forerun.spec.proposer import Draft, Grant
    from forerun.spec.verifier import Verdict


class SpecTotals(msgspec.Struct):
    """Counters of speculation since the start, for all requests or for one proposer."""

    num_drafts: int = 0  # (request, step) pairs with at least one drafted token verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    num_loosely_accepted_tokens: int = 0  # of the accepted, those that the target's own rule had rejected

    def observe(self, num_drafted: int, num_accepted: int, num_loose: int = 0) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.num_loosely_accepted_tokens += num_loose
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (num_accepted - len(per_pos)))
        for position in range(num_accepted):
            per_pos[position] += 1

    def after(self, past: SpecTotals) -> SpecTotals:
        """These counts where `past` was counted before."""
        pairs = itertools.zip_longest(past.num_accepted_tokens_per_pos, self.num_accepted_tokens_per_pos, fillvalue=0)
        return SpecTotals(
            past.num_drafts + self.num_drafts,
            past.num_draft_tokens + self.num_draft_tokens,
            past.num_accepted_tokens + self.num_accepted_tokens,
            [before + now for before, now in pairs],
            past.num_loosely_accepted_tokens + self.num_loosely_accepted_tokens,
        )


class Stopwatch:
    """Adds up the time spent in its `with` blocks, on the host's clock.

    Attributes:
        wait: called at the end of a block before the time is read; on a GPU, what waits for its work in a profile.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.wait: Callable[[], object] | None = None

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.wait is not None:
            self.wait()
        self.total_s += time.perf_counter() - self._started


NOT_DRAFTED = {
    "off": "the request, or the table of K by batch size, asks for none",
    "at_end": "one token is left to generate",
    "no_room": "no rows or blocks were left for it",
    "nothing_found": "no proposer had a guess",
}


class SpecCounters:
    """Totals over everything, and by proposer.

    Attributes:
        not_drafted: (request, step) pairs that decoded without a draft, by reason (`NOT_DRAFTED`).
    """

    def __init__(self) -> None:
        self.totals = SpecTotals()
        self.by_proposer: dict[str, SpecTotals] = {}
        self.not_drafted = dict.fromkeys(NOT_DRAFTED, 0)

    def note_missing(self, plan: Plan, lengths: Mapping[str, int], grant: Grant, draft: Draft) -> None:
        """Count the requests of one step that decode without a draft; before anything of it is committed."""
        for s in plan.scheduled:
            request = s.request
            if s.draft.tokens or not request.decoding:
                continue
            if not lengths.get(request.request_id, 0):
                reason = "off"
            elif request.remaining_tokens <= 1:
                reason = "at_end"
            elif request.request_id not in grant.lengths or draft.of(request.request_id).tokens:
                reason = "no_room"
            else:
                reason = "nothing_found"
            self.not_drafted[reason] += 1

    def observe(self, plan: Plan, verdict: Verdict) -> None:
        """Count one step: drafted tokens are those verified, accepted ones those that stand after any stop."""
        for s in plan.scheduled:
            if s.samples and len(s.draft):
                stands = verdict.by_request[s.request.request_id]
                counts = len(s.draft), len(stands.accepted), len(stands.loose)
                self.totals.observe(*counts)
                self.by_proposer.setdefault(s.draft.source, SpecTotals()).observe(*counts)
