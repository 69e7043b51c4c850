"""A smaller language model drafts, token by token or, made for it (PARD), all tokens in one pass.

Its keys and values lie in a cache group of their own. Before it drafts for a request it computes the known tokens that
its cache lacks: after an accepted draft one or two, more after a pause, all of a prompt that it has not seen. One pass
covers all requests of a step, each with its own length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.attention import Segment
from forerun.models.decoder import Decoder
from forerun.models.paged import PagedModel
from forerun.spec.proposer import UNKNOWN, Draft, DraftInputs, Grant, Proposer, RequestDraft
from forerun.spec.proposers.drafting import Chooser, Job
from forerun.spec.proposers.recorded_drafts import RecordedDrafts

if TYPE_CHECKING:
    from forerun.attention.slots import BlockTables, SlotBatch
    from forerun.engine.slots import Slots
    from forerun.memory.groups import GroupSpec
    from forerun.request import Request


class DraftModelProposer(Proposer):
    """Drafts with a model of its own.

    Args:
        model: the draft model.
        group: its cache group; `group.max_tokens` is its context.
        chooser: from its logits to tokens.
        block_size: tokens a block.
        kv_dtype: of its keys and values.
        max_rows: most tokens computed in a step to fill the cache with prompts and after pauses; what is left waits.
        mask_token_id: of a PARD model: all tokens come from one pass over copies of it; None: one by one.
        name: as which the drafts are counted.
        notes: lines for the start-up log.
    """

    def __init__(
        self,
        model: Decoder,
        group: GroupSpec,
        chooser: Chooser,
        *,
        block_size: int,
        kv_dtype: torch.dtype,
        max_rows: int,
        mask_token_id: int | None = None,
        name: str = "draft_model",
        notes: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.group: GroupSpec = group
        self.notes = notes
        self.block_size = block_size
        self._kv_dtype = kv_dtype
        self._model = model
        self._chooser = chooser
        self._max_rows = max_rows
        self._mask_token_id = mask_token_id

    def attach(self, place: int, memory: Tensor) -> None:
        self._place = place
        self._paged = PagedModel.over(self._model, memory, self._kv_dtype, self.block_size)

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        draft = Draft()
        jobs: list[Job] = []
        segments: list[Segment] = []
        rows: list[int] = []  # of the pass, whose logits give the jobs' first tokens
        num_rows = 0
        budget = self._max_rows
        for request, end, length in self._work(grant):
            cache = request.caches[self._place]
            usual = length + 1 if length else 0  # what a draft leaves to be caught up with, and more
            end = min(end, cache.num_tokens + usual + budget)
            if end <= cache.num_tokens:
                continue
            budget -= max(0, end - cache.num_tokens - usual)
            token_ids = list(self._chooser.vocabulary.to_draft(request.token_ids[cache.num_tokens : end]))
            draft.filled[self._place, request.request_id] = end
            num_rows += len(token_ids)
            if length > 0 and end == request.num_tokens:
                masks = self._masks(length)
                jobs.append(Job(request, length))
                rows += range(num_rows - 1, num_rows + len(masks))
                num_rows += len(masks)
                token_ids += masks
            segments.append(Segment(token_ids, cache.num_tokens, cache.blocks))
        if segments:
            output = self._paged.forward(segments)
            if jobs:
                make = self._draft_one_by_one if self._mask_token_id is None else self._chooser.choose_all
                make(jobs, self._paged.logits(output, rows))
        draft.by_request = {job.request.request_id: job.result(self.name) for job in jobs}
        return draft

    # -- by tables on the device

    @property
    def serves_slots(self) -> bool:  # type: ignore[override]
        return self._chooser.is_plain and self._mask_token_id is None

    @torch.inference_mode()
    def draft_slots(self, slots: Slots, grant: Grant) -> Draft:
        """Each draft begins with the two last tokens of its request: all others are in the cache, since a draft feeds
        itself all of its tokens but the last, and the target adds one. What else is missing the host knows."""
        draft = Draft()
        lengths = self._catch_up(grant, draft)
        if not lengths:
            return draft
        requests = [request for request in grant.requests if request.request_id in lengths]
        for request in requests:
            draft.filled[self._place, request.request_id] = request.most_tokens
            length = lengths[request.request_id]
            tokens = [UNKNOWN] * length
            draft.by_request[request.request_id] = RequestDraft(tokens, self.name, num_cached=length - 1)
        self._recorded.draft(slots, requests, [lengths[r.request_id] for r in requests])
        return draft

    def _catch_up(self, grant: Grant, draft: Draft) -> dict[str, int]:
        """Compute what the host knows and the cache lacks, but for the last tokens; how far each request may draft."""
        lengths: dict[str, int] = {}
        segments: list[Segment] = []
        budget = self._max_rows
        for request, end, length in self._work(grant):
            cache = request.caches[self._place]
            if request.most_tokens < 2:
                continue  # a draft begins with two tokens
            known = min(end, request.num_tokens - 1) if length else end
            lacks = known - cache.num_tokens
            if length and lacks <= (0 if request.num_in_flight else 1):
                lengths[request.request_id] = length
                continue
            stop = min(known, cache.num_tokens + budget)
            if stop > cache.num_tokens:
                budget -= stop - cache.num_tokens
                token_ids = self._chooser.vocabulary.to_draft(request.token_ids[cache.num_tokens : stop])
                segments.append(Segment(token_ids, cache.num_tokens, cache.blocks))
                draft.filled[self._place, request.request_id] = stop
            if length and stop == known:
                lengths[request.request_id] = length
        if segments:
            self._paged.forward(segments)
        return lengths

    def attach_slots(self, slots: Slots, shapes: Sequence[tuple[int, int]]) -> None:
        def draft(batch: SlotBatch, num_tokens: int) -> None:
            self._draft_chain(batch, slots.blocks[self._place], num_tokens)

        self._recorded = RecordedDrafts(draft)
        self._recorded.record(slots, shapes)

    def _draft_chain(self, batch: SlotBatch, blocks: BlockTables, num_tokens: int) -> None:
        """batch.rows: how far each slot drafts: it has no blocks for more."""
        vocabulary, tables = self._chooser.vocabulary, batch.tables
        for place in range(num_tokens):
            going = (batch.rows > place).long()
            if place == 0:
                step = dataclasses.replace(batch, rows=2 * going, width=2, first=-1, shift=-1)
            else:
                step = dataclasses.replace(batch, rows=going, first=place, shift=place)
            _, output = self._paged.forward_slots(step, blocks, fed=vocabulary.fed)
            ends = output.hidden.view(batch.num_slots, step.width, -1)[:, -1]
            best = self._chooser.best(self._paged.model.logits(ends))
            tables.drafted[:, place].index_copy_(0, batch.slots, best.int())

    def _work(self, grant: Grant) -> Iterator[tuple[Request, int, int]]:
        """(request, end of the known tokens to compute, tokens to draft): those that may draft first."""
        for request in grant.requests:
            room = self._room(request)
            if room >= request.most_tokens:
                # the last drafted token is never fed: it needs no slot
                length = min(grant.lengths[request.request_id], room - request.most_tokens + 1)
                yield request, request.num_tokens, length
        for request in grant.filling:
            yield request, min(request.num_computed_tokens, self._room(request)), 0

    def _room(self, request: Request) -> int:
        """Tokens of the request that the blocks it holds, and the model's context, have room for."""
        held = len(request.caches[self._place].blocks) * self.block_size
        return min(held, self.group.max_tokens)

    def _masks(self, length: int) -> list[int]:
        return [] if self._mask_token_id is None else [self._mask_token_id] * (length - 1)

    def _draft_one_by_one(self, jobs: Sequence[Job], logits: Tensor) -> None:
        """logits: [B, V], of each job's last known token."""
        active = self._chooser.choose(jobs, logits)
        while active:
            segments: list[Segment] = []
            for job in active:
                fed = self._chooser.vocabulary.to_draft(job.tokens[-1:])
                blocks = job.request.caches[self._place].blocks
                segments.append(Segment(fed, job.request.num_tokens + job.num_cached, blocks))
                job.num_cached += 1
            output = self._paged.forward(segments)
            active = self._chooser.choose(active, self._paged.logits(output, range(len(active))))
