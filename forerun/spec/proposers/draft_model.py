"""A smaller language model drafts, token by token or, made for it (PARD), all tokens in one pass.

Its keys and values lie in a cache group of their own. Before it drafts for a request it computes the known tokens that
its cache lacks: after an accepted draft one or two, more after a pause, all of a prompt that it has not seen. One pass
covers all requests of a step, each with its own length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.attention import Segment
from forerun.models.decoder import Decoder
from forerun.models.paged import PagedModel
from forerun.sampling.distribution import draw, processed_logprobs
from forerun.sampling.noise import Stream
from forerun.spec.proposer import Draft, DraftInputs, Grant, Proposer, RequestDraft
from forerun.spec.vocabulary import Vocabulary

if TYPE_CHECKING:
    from forerun.memory.groups import GroupSpec
    from forerun.request import Request


@dataclass(slots=True)
class Job:
    """A request that is being drafted for. `draft_ids` are `tokens` in the draft model's vocabulary."""

    request: Request
    length: int
    tokens: list[int] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    num_cached: int = 0

    def result(self, source: str) -> RequestDraft:
        probs = torch.stack(self.probs) if self.probs else None
        return RequestDraft(self.tokens, source, None, probs, self.confidence, self.num_cached)


class DraftModelProposer(Proposer):
    """Drafts with a model of its own.

    Args:
        model: the draft model.
        group: its cache group; `group.max_tokens` is its context.
        block_size: tokens a block.
        kv_dtype: of its keys and values.
        vocabulary: how its ids stand for the target's.
        target_size: of the target's vocabulary, for the width of `RequestDraft.probs`.
        max_rows: most tokens computed in a step to fill the cache with prompts and after pauses; what is left waits.
        sample_method: "greedy": the most likely token; "coupled": drawn from the draft's own processed distribution
            with the target's noise; "probabilistic": the same with noise of its own, and the distribution is kept.
        min_prob: a draft ends before a token that the model itself gives less than this; where drafts are
            probabilistic, before a distribution whose likeliest token has less: what is drawn must not decide.
        mask_token_id: of a PARD model: all tokens come from one pass over copies of it; None: one by one.
        name: as which the drafts are counted.
        notes: lines for the start-up log.
    """

    def __init__(
        self,
        model: Decoder,
        group: GroupSpec,
        vocabulary: Vocabulary,
        *,
        block_size: int,
        kv_dtype: torch.dtype,
        target_size: int,
        max_rows: int,
        sample_method: str = "greedy",
        min_prob: float = 0.0,
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
        self._vocabulary = vocabulary
        self._target_size = target_size
        self._max_rows = max_rows
        self._sample_method = sample_method
        self._min_prob = min_prob
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
            token_ids = list(self._vocabulary.to_draft(request.token_ids[cache.num_tokens : end]))
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
                make = self._draft_one_by_one if self._mask_token_id is None else self._draft_at_once
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
        active = self._choose(jobs, logits)
        while active:
            segments: list[Segment] = []
            for job in active:
                blocks = job.request.caches[self._place].blocks
                segments.append(Segment(job.draft_ids[-1:], job.request.num_tokens + job.num_cached, blocks))
                job.num_cached += 1
            output = self._paged.forward(segments)
            active = self._choose(active, self._paged.logits(output, range(len(active))))

    def _draft_at_once(self, jobs: Sequence[Job], logits: Tensor) -> None:
        """logits: [rows, V], of each job's last known token and its masks."""
        active = list(zip(jobs, logits.split_with_sizes([job.length for job in jobs]), strict=True))
        while active:
            self._choose([job for job, _ in active], torch.stack([rows[len(job.tokens)] for job, rows in active]))
            active = [(job, rows) for job, rows in active if len(job.tokens) < job.length]

    def _choose(self, jobs: Sequence[Job], logits: Tensor) -> list[Job]:
        """Append a token to each job, from its row of logits [B, V]; those that are to go on."""
        if not jobs:
            return []
        logits = self._vocabulary.restrict(logits)
        best, total = logits.max(dim=-1), logits.logsumexp(dim=-1)
        going: list[Job] = []
        for row, job in enumerate(jobs):
            token, probs = self._token(job, logits[row], int(best.indices[row]))
            own_prob = float(torch.exp(logits[row, token] - total[row]))
            deciding = own_prob if probs is None else float(torch.exp(best.values[row] - total[row]))
            if not deciding >= self._min_prob:  # NaN too
                job.length = len(job.tokens)
                continue
            job.draft_ids.append(token)
            job.tokens.append(self._vocabulary.to_target(token))
            job.confidence.append(own_prob * (job.confidence[-1] if job.confidence else 1.0))
            if probs is not None:
                job.probs.append(probs)
            if len(job.tokens) < job.length:
                going.append(job)
        return going

    def _token(self, job: Job, logits: Tensor, best: int) -> tuple[int, Tensor | None]:
        """A token from one row of logits [V], and the distribution it was drawn from where that is to be kept."""
        request = job.request
        if self._sample_method == "greedy" or request.params.greedy:
            return best, None
        coupled = self._sample_method == "coupled"
        logprobs = processed_logprobs(logits, request.params)
        position = request.num_output_tokens + len(job.tokens)
        stream = Stream.TARGET if coupled else Stream.DRAFT
        token = draw(logprobs, request.seed, request.choice, position, stream=stream)
        if coupled:
            return token, None
        probs = logprobs.new_zeros(self._target_size)
        probs[: logprobs.shape[0]] = logprobs.exp()
        return token, probs
