"""The plan of a step: ints and references only, so that the scheduler needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from forerun.request import Request
from forerun.sampling.batch import SamplingRows
from forerun.spec.proposer import EMPTY_DRAFT, Draft, RequestDraft

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.spec.verifier import TokenLogprobs


@dataclass(slots=True, frozen=True)
class ScheduledRequest:
    """A request's part of a step.

    Attributes:
        start: position of the first token computed; of a request with tokens in flight the most that it may be.
        num_tokens: known tokens computed; drafted ones come on top.
        draft: drafted tokens computed after them.
        samples: the last known token is among them, so that its row and the drafts' rows get logits.
    """

    request: Request
    start: int
    num_tokens: int
    draft: RequestDraft = EMPTY_DRAFT
    samples: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft)

    @property
    def most_emitted(self) -> int:
        """Tokens that may come of it."""
        return 1 + len(self.draft) if self.samples else 0

    @property
    def prompt_targets(self) -> list[int]:
        """The prompt's tokens whose log-probabilities are asked for; this part's rows, from the first on, give them."""
        if not self.request.wants_prompt_logprobs:
            return []
        end = min(self.start + self.num_tokens + 1, self.request.num_prompt_tokens)
        return self.request.token_ids[self.start + 1 : end]


@dataclass
class Plan:
    """One target pass: which tokens of which request. Rows are laid out in the order of `scheduled`, which does not
    change once the plan is made: what follows from it is worked out once."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)

    def still_running(self) -> Plan:
        """Without the requests that have ended since it was made."""
        running = [s for s in self.scheduled if s.request.slot >= 0]
        return self if len(running) == len(self.scheduled) else Plan(running)

    @cached_property
    def num_rows(self) -> int:
        return sum(s.num_rows for s in self.scheduled)

    @cached_property
    def logit_rows(self) -> list[int]:
        """The rows of the pass that get logits: the last known token's and the drafts', request by request."""
        rows: list[int] = []
        first = 0
        for s in self.scheduled:
            if s.samples:
                rows += range(first + s.num_tokens - 1, first + s.num_rows)
            first += s.num_rows
        return rows

    @cached_property
    def draft(self) -> Draft:
        """The drafts that are really verified, cut to the budget."""
        return Draft({s.request.request_id: s.draft for s in self.scheduled if s.samples and s.draft.tokens})

    @cached_property
    def sampling(self) -> list[SamplingRows]:
        rows: list[SamplingRows] = []
        first = 0
        for s in self.scheduled:
            if s.samples:
                rows.append(SamplingRows.of(s.request, first, len(s.draft)))
                first += 1 + len(s.draft)
        return rows


@dataclass(slots=True)
class Hidden:
    """Target states of all rows of a step: taps[(layer, after final norm)] is [T, H], rows in the plan's order."""

    taps: dict[tuple[int, bool], Tensor]


@dataclass(slots=True)
class ForwardResult:
    """logits: [R, V] float32, rows as in `Plan.sampling`. hidden: what the proposer asked to see, else None.
    prompt_logprobs: by request id, of `ScheduledRequest.prompt_targets` where there are any."""

    logits: Tensor
    hidden: Hidden | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
