"""What the metrics and log lines say about speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from forerun.engine.plan import Plan
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


class SpecCounters:
    """Totals over everything, and by proposer."""

    def __init__(self) -> None:
        self.totals = SpecTotals()
        self.by_proposer: dict[str, SpecTotals] = {}

    def observe(self, plan: Plan, verdict: Verdict) -> None:
        """Count one step: drafted tokens are those verified, accepted ones those that stand after any stop."""
        for s in plan.scheduled:
            if s.samples and len(s.draft):
                stands = verdict.by_request[s.request.request_id]
                counts = len(s.draft), len(stands.accepted), len(stands.loose)
                self.totals.observe(*counts)
                self.by_proposer.setdefault(s.draft.source, SpecTotals()).observe(*counts)
