"""Runs the target over a plan, and keeps its cache true to what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.attention import Segment
from forerun.engine.plan import ForwardResult, Hidden, Plan, ScheduledRequest
from forerun.models.paged import PagedModel
from forerun.spec.verifier import Verdict


class Runner:
    """The target and its cache group.

    Args:
        target: the model with its cache.
        taps: target states that the proposer wants to see.
    """

    def __init__(self, target: PagedModel, taps: Sequence[tuple[int, bool]] = ()) -> None:
        self.target = target
        self.taps = taps

    def forward(self, plan: Plan) -> ForwardResult:
        """One pass over all rows of the plan; logits where `Plan.sampling` wants them."""
        output = self.target.forward([_segment(s) for s in plan.scheduled], self.taps)
        logits = self.target.logits(output, plan.logit_rows)
        return ForwardResult(logits, Hidden(output.taps) if self.taps else None)

    @torch.inference_mode()
    def keep(self, plan: Plan, verdict: Verdict) -> None:
        """Move the accepted path of each tree to the slots that a chain would have used."""
        sources: list[int] = []
        targets: list[int] = []
        for s in plan.scheduled:
            if s.draft.parents is None:
                continue
            slots = _segment(s).slots(self.target.block_size)[s.num_tokens :]
            for place, node in enumerate(verdict.by_request[s.request.request_id].accepted):
                if node != place:
                    sources.append(slots[node])
                    targets.append(slots[place])
        if sources:
            self.target.attention.move(sources, targets)


def _segment(s: ScheduledRequest) -> Segment:
    known = s.request.token_ids[s.start : s.start + s.num_tokens]
    return Segment(known + s.draft.tokens, s.start, s.request.caches[0].blocks, s.draft.parents or ())
