"""A step of which the host learns later: tokens, positions and verdict stay on the device, and the next one follows.

What is launched, in the device's order: a draft for every request that may have one, the target's pass over the last
known and the drafted tokens, draws and judgement, what the proposer keeps of the rows that stand; then the same for the
prompts of the step, whose tokens the host knows. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.attention.slots import SlotBatch
from forerun.engine.plan import Plan, ScheduledRequest
from forerun.engine.runner import segment_of
from forerun.engine.slots import Reading, Slots
from forerun.kernels.uploads import upload
from forerun.models.decoder import Tap
from forerun.models.paged import PagedModel
from forerun.request import FinishReason, Request
from forerun.sampling.slots import draw_rows, judge
from forerun.spec.proposer import Draft, Grant, KnownRows, Proposer
from forerun.spec.verifier import RequestVerdict, Verdict


class Verdicts:
    """What came of a plan, once it is read.

    Args:
        parts: for some requests of the plan their rows of `sampling.slots.judge`.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[ScheduledRequest], Tensor]]) -> None:
        self._parts = [(scheduled, Reading(numbers)) for scheduled, numbers in parts]

    def read(self) -> Verdict:
        """Waits for the device."""
        verdict = Verdict()
        for scheduled, reading in self._parts:
            for s, (num_accepted, num_emitted, *token_ids) in zip(scheduled, reading.wait(), strict=False):
                stands = RequestVerdict(list(range(num_accepted)), token_ids[:num_emitted], len(s.draft))
                if num_emitted == num_accepted:
                    stands.finish_reason = FinishReason.ERROR
                verdict.by_request[s.request.request_id] = stands
        return verdict


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Launches steps.

    Attributes:
        taps: target states that the proposer wants to see.
        proposer: one that `serves_slots`; None: nobody drafts.
        rule: the server's, "match" or "synthetic".
        rates: of "synthetic", see `sampling.slots.judge`.
    """

    target: PagedModel
    slots: Slots
    rule: str = "match"
    taps: Sequence[Tap] = ()
    proposer: Proposer | None = None
    rates: Tensor | None = None

    def serves(self, request: Request, changed: bool) -> bool:
        """Whether the device alone can draw for the request and judge its drafts.

        changed: whether its logits are changed before tokens are drawn.
        """
        params = request.params
        seen = params.wants_logprobs or params.prompt_logprobs is not None
        own_rule = request.rejection_sample_method not in ("", self.rule)
        by_chance = self.rates is not None and not params.greedy  # a rejection is drawn from what is left
        return not (changed or seen or own_rule or by_chance)

    @torch.inference_mode()
    def propose(self, grant: Grant) -> Draft:
        """Drafts whose tokens nobody has seen: they are in `SlotTables.drafted`."""
        if self.proposer is None or not (grant.requests or grant.filling):
            return Draft()
        self.slots.update(grant.requests)
        return self.proposer.draft_slots(self.slots, grant)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Verdicts:
        """Launch a plan. Requests that sample are left as the verdict says, in `Slots`."""
        decoding = [s for s in plan.scheduled if s.samples and s.num_tokens == 1]
        prompts = [s for s in plan.scheduled if not (s.samples and s.num_tokens == 1)]
        self.slots.update([s.request for s in plan.scheduled if s.samples])
        parts = []
        if decoding:
            parts.append((decoding, self._decode(decoding)))
        if prompts:
            sampled = [s for s in prompts if s.samples]
            numbers = self._prefill(prompts, sampled)
            parts += [(sampled, numbers)] if numbers is not None else []
        return Verdicts(parts)

    def _decode(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        counts = [s.num_rows for s in scheduled]
        size, width = self.target.slot_shape(len(counts), max(counts))
        batch = self.slots.batch([s.request for s in scheduled], counts, size, width)
        rows, output = self.target.forward_slots(batch, self.slots.blocks[0], self.taps)
        num_rows = len(counts) * width
        logits = self.target.model.logits(output.hidden[:num_rows], None)
        drawn = self._draw(scheduled, logits, rows.slots[:num_rows], rows.output_positions[:num_rows])
        before = batch.tables.positions[batch.slots]
        verdict = self._judge(batch, len(counts), drawn.view(-1, width))
        if self.proposer is not None:
            self.proposer.follow_slots(batch, before, verdict, output.taps)
        return verdict

    def _draw(self, scheduled: Sequence[ScheduledRequest], logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        filtered = any(s.request.params.filters for s in scheduled)
        return draw_rows(logits, slots, positions, self.slots.params, filtered=filtered)

    def _judge(self, batch: SlotBatch, count: int, drawn: Tensor) -> Tensor:
        tables, slots = batch.tables, batch.slots[:count]
        drafted = tables.drafted[slots, : batch.width - 1].long()
        rows = batch.rows[:count]
        return judge(drawn, drafted, rows, slots, tables.positions, tables.last, self.slots.params, self.rates)

    def _prefill(self, prompts: Sequence[ScheduledRequest], sampled: Sequence[ScheduledRequest]) -> Tensor | None:
        """Of the requests that are at the end of their prompts the verdict."""
        segments = [segment_of(s) for s in prompts]
        output = self.target.forward(segments, self.taps)
        verdict = None
        if sampled:
            ends: list[int] = []
            first = 0
            for s in prompts:
                first += s.num_tokens
                ends += [first - 1] if s.samples else []
            batch = self.slots.batch([s.request for s in sampled], [1] * len(sampled), len(sampled), 1)
            positions = [s.request.num_output_tokens for s in sampled]
            logits = self.target.logits(output, ends)
            decides = upload(positions, torch.int64, logits.device)
            drawn = self._draw(sampled, logits, batch.slots, decides)
            verdict = self._judge(batch, len(sampled), drawn.view(-1, 1))
        if self.proposer is not None:
            self.proposer.follow_known(
                KnownRows([s.request for s in prompts], segments, [s.samples for s in prompts]), verdict, output.taps
            )
        return verdict
