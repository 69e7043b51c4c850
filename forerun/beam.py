"""Beam search: the most likely continuations of a prompt. It lives in the front: each round asks the engine for the
likeliest next tokens of every beam, as plain requests for one token, which no draft could shorten. No torch here.

Scores and rounds are those of vLLM's `beam_search`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from forerun.errors import RequestError
from forerun.request import MAX_LOGPROBS, FinishReason, SamplingParams
from forerun.spec.verifier import TokenLogprobs

MAX_BEAMS = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """
    Attributes:
        beam_width: beams that are followed, and answers that are given.
        max_tokens: most tokens of an answer.
        ignore_eos: go on past the model's end tokens.
        length_penalty: an answer's score is its log-probability divided by its length, prompt included, to this power.
        early_stopping: end as soon as `beam_width` answers have ended; otherwise when all have, or at `max_tokens`.

    Raises:
        RequestError: a value out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAMS:
            raise RequestError(f"beam search follows 1 to {MAX_BEAMS} beams, got {self.beam_width}", "n")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            limit = f"[-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
            raise RequestError(f"length_penalty must be in {limit}, got {self.length_penalty}", "length_penalty")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")

    def one_token(self) -> SamplingParams:
        """What the engine is asked of each beam."""
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2 * self.beam_width)


@dataclass(slots=True)
class Beam:
    """A continuation: its tokens without the prompt's, and the sum of their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason = FinishReason.LENGTH


class BeamSearch:
    """The search from one prompt: as long as there are `pending` sequences, give their next tokens to `extend`.

    Args:
        eos_token_ids: of the model; a beam that draws one has ended.
        max_model_len: most tokens of prompt and answer.
    """

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, eos_token_ids: Collection[int], max_model_len: int
    ) -> None:
        self._prompt = list(prompt)
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._num_left = min(params.max_tokens, max_model_len - len(prompt))
        self._beams = [Beam()]
        self._ended: list[Beam] = []

    @property
    def pending(self) -> list[list[int]]:
        """Sequences whose next tokens are wanted; none when the search has ended."""
        enough = self._params.early_stopping and len(self._ended) >= self._params.beam_width
        return [] if enough or self._num_left <= 0 else [self._prompt + beam.token_ids for beam in self._beams]

    def extend(self, entries: Sequence[TokenLogprobs]) -> None:
        """The answers to `one_token` for each of `pending`, in its order."""
        longer: list[Beam] = []
        for beam, entry in zip(self._beams, entries, strict=True):
            for token_id, logprob in entry.top:
                ends = token_id in self._ends
                reason = FinishReason.STOP if ends else FinishReason.LENGTH
                found = Beam([*beam.token_ids, token_id], beam.cumulative_logprob + logprob, reason)
                (self._ended if ends else longer).append(found)
        self._beams = self._best_of(longer)
        self._num_left -= 1

    def best(self) -> list[Beam]:
        """At most `beam_width` continuations, best first."""
        return self._best_of([*self._ended, *self._beams])

    def _best_of(self, beams: Sequence[Beam]) -> list[Beam]:
        return heapq.nlargest(self._params.beam_width, beams, key=self._score)

    def _score(self, beam: Beam) -> float:
        length = len(self._prompt) + len(beam.token_ids) - (beam.finish_reason is FinishReason.STOP)
        return float(beam.cumulative_logprob / length**self._params.length_penalty)
