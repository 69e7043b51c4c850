"""A smaller language model drafts, token by token or, made for it (PARD), all tokens in one pass.

Its keys and values lie in a cache group of their own. Before it drafts for a request it computes the known tokens that
its cache lacks: after an accepted draft one or two, more after a pause, all of a prompt that it has not seen. One pass
covers all requests of a step, each with its own length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.attention import Segment
from forerun.models.decoder import Decoder
from forerun.models.paged import PagedModel
from forerun.spec.proposer import Draft, DraftInputs, Grant, Proposer
from forerun.spec.proposers.drafting import Chooser, Job

if TYPE_CHECKING:
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

    def _work(self, grant: Grant) -> Iterator[tuple[Request, int, int]]:
        """(request, end of the known tokens to compute, tokens to draft): those that may draft first."""
        for request in grant.requests:
            room = self._room(request)
            if room >= request.num_tokens:
                # the last drafted token is never fed: it needs no slot
                yield request, request.num_tokens, min(grant.lengths[request.request_id], room - request.num_tokens + 1)
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
