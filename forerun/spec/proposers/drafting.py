"""How a draft model's or a head's logits become drafted tokens: what all that draw from logits share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.request import Request
from forerun.sampling.distribution import draw, processed_logprobs
from forerun.sampling.noise import Stream
from forerun.spec.proposer import RequestDraft
from forerun.spec.vocabulary import Vocabulary


@dataclass(slots=True)
class Job:
    """A request that is being drafted for: what the draft consists of so far, see `RequestDraft`."""

    request: Request
    length: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    num_cached: int = 0

    def result(self, source: str) -> RequestDraft:
        probs = torch.stack(self.probs) if self.probs else None
        return RequestDraft(self.tokens, source, None, probs, self.confidence, self.num_cached)


class Chooser:
    """Chooses the next token of each job from its logits.

    Args:
        vocabulary: how the ids of the logits stand for the target's.
        target_size: of the target's vocabulary, for the width of `RequestDraft.probs`.
        sample_method: "greedy": the most likely token; "coupled": drawn from the draft's own processed distribution
            with the target's noise; "probabilistic": the same with noise of its own, and the distribution is kept.
        min_prob: a draft ends before a token that the model itself gives less than this; where drafts are
            probabilistic, before a distribution whose likeliest token has less: what is drawn must not decide.
    """

    def __init__(
        self, vocabulary: Vocabulary, target_size: int, sample_method: str = "greedy", min_prob: float = 0.0
    ) -> None:
        self.vocabulary = vocabulary
        self._target_size = target_size
        self._sample_method = sample_method
        self._min_prob = min_prob

    @property
    def takes_likeliest(self) -> bool:
        """Whether every draft is the likeliest tokens, as many as were asked for."""
        return self._sample_method == "greedy" and self._min_prob == 0

    def choose(self, jobs: Sequence[Job], logits: Tensor) -> list[Job]:
        """Append a token to each job, from its row of logits [B, V]; those that are to go on."""
        if not jobs:
            return []
        logits = self.vocabulary.restrict(logits)
        best, total = logits.max(dim=-1), logits.logsumexp(dim=-1)
        going: list[Job] = []
        for row, job in enumerate(jobs):
            own_prob, probs = float(torch.exp(best.values[row] - total[row])), None
            token = self.vocabulary.to_target(int(best.indices[row]))
            draws = not (self._sample_method == "greedy" or job.request.params.greedy)
            if draws and own_prob >= self._min_prob:
                token, own_prob, probs = self._draw(job, logits[row], float(total[row]))
            if probs is None and not own_prob >= self._min_prob:  # NaN too
                job.length = len(job.tokens)
                continue
            job.tokens.append(token)
            job.confidence.append(own_prob * (job.confidence[-1] if job.confidence else 1.0))
            if probs is not None:
                job.probs.append(probs)
            if len(job.tokens) < job.length:
                going.append(job)
        return going

    def choose_all(self, jobs: Sequence[Job], logits: Tensor) -> None:
        """All tokens at once, from `job.length` rows of each job, one after another: [rows, V]."""
        active = list(zip(jobs, logits.split_with_sizes([job.length for job in jobs]), strict=True))
        while active:
            self.choose([job for job, _ in active], torch.stack([rows[len(job.tokens)] for job, rows in active]))
            active = [(job, rows) for job, rows in active if len(job.tokens) < job.length]

    def _draw(self, job: Job, logits: Tensor, total: float) -> tuple[int, float, Tensor | None]:
        """A token in target ids, its probability before any processing, and the distribution it was drawn from where
        that is to be kept. logits: [V]; total: their logsumexp."""
        request, place = job.request, len(job.tokens)
        coupled = self._sample_method == "coupled"
        logits = self.vocabulary.in_target_ids(logits)
        logprobs = processed_logprobs(logits, request.params)
        root = request.num_output_tokens
        # A rule may look at a token beyond the one that it rejects: the next draft of that position needs new noise.
        keys = (root + place, Stream.TARGET, 0) if coupled else (root, Stream.DRAFT, place)
        token = draw(logprobs, request.seed, request.choice, *keys)
        own_prob = float(torch.exp(logits[token] - total))
        if coupled:
            return token, own_prob, None
        probs = logprobs.new_zeros(self._target_size)
        probs[: logprobs.shape[0]] = logprobs.exp()
        return token, own_prob, probs
