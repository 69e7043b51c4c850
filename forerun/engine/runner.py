"""Runs the target over a plan, and keeps its cache true to what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.attention import Segment
from forerun.engine.plan import ForwardResult, Hidden, Plan, ScheduledRequest
from forerun.models.decoder import DecoderOutput
from forerun.models.paged import PagedModel
from forerun.sampling.logprobs import token_logprobs
from forerun.spec.verifier import TokenLogprobs, Verdict

PROMPT_ROWS = 32  # of logits at once


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
        output = self.target.forward([segment_of(s) for s in plan.scheduled], self.taps)
        logits = self.target.logits(output, plan.logit_rows)
        hidden = Hidden(output.taps) if self.taps else None
        return ForwardResult(logits, hidden, self._prompt_logprobs(plan, output))

    def _prompt_logprobs(self, plan: Plan, output: DecoderOutput) -> dict[str, list[TokenLogprobs]]:
        """A few rows at a time: prompts are long, and vocabularies large."""
        found: dict[str, list[TokenLogprobs]] = {}
        first = 0
        for s in plan.scheduled:
            targets, entries = s.prompt_targets, []
            for begin in range(0, len(targets), PROMPT_ROWS):
                some = targets[begin : begin + PROMPT_ROWS]
                rows = range(first + begin, first + begin + len(some))
                logits = self.target.logits(output, rows)
                num_top = s.request.params.prompt_logprobs or 0
                entries += [token_logprobs(row, token, num_top) for row, token in zip(logits, some, strict=True)]
            if targets:
                found[s.request.request_id] = entries
            first += s.num_rows
        return found

    @torch.inference_mode()
    def keep(self, plan: Plan, verdict: Verdict) -> None:
        """Move the accepted path of each tree to the slots that a chain would have used."""
        sources: list[int] = []
        targets: list[int] = []
        for s in plan.scheduled:
            if s.draft.parents is None:
                continue
            slots = segment_of(s).slots(self.target.block_size)[s.num_tokens :]
            for place, node in enumerate(verdict.by_request[s.request.request_id].accepted):
                if node != place:
                    sources.append(slots[node])
                    targets.append(slots[place])
        if sources:
            self.target.attention.move(sources, targets)


def segment_of(s: ScheduledRequest) -> Segment:
    """A request's rows of a step, drafted ones included."""
    known = s.request.token_ids[s.start : s.start + s.num_tokens]
    return Segment(known + s.draft.tokens, s.start, s.request.caches[0].blocks, s.draft.parents or ())
