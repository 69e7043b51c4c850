"""An index over each request's own history, kept up to date: what n-gram and suffix proposers share. No torch here.

What requests learn from each other is kept by `cache_salt`, as blocks of the prefix cache are: those of one salt share
it (those without one are of the salt ""), and can tell from a fast answer that another said the same; those of another
salt cannot.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from forerun.request import FinishReason
from forerun.spec.proposer import Draft, DraftInputs, Proposer, RequestDraft

if TYPE_CHECKING:
    from forerun.engine.plan import Hidden, Plan
    from forerun.request import Request
    from forerun.spec.config import MethodConfig
    from forerun.spec.proposer import Grant
    from forerun.spec.verifier import Verdict

# Most tokens of history that one call of `propose` or `observe` indexes, so that a long prompt found in the prefix
# cache costs many steps some milliseconds each, not one step all of them. Prompts that are computed come in chunks.
MAX_INDEXED_PER_CALL: Final = 8192
_ENDED: Final = (FinishReason.STOP, FinishReason.LENGTH)


class HistoryIndex(Protocol):
    """What is known of one request's history."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the history that are indexed."""
        ...

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        """Index the tokens from `num_tokens` up to `end`."""
        ...

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> RequestDraft:
        """What may follow `token_ids`, all of which are indexed; empty where nothing is worth trying."""
        ...

    @property
    def num_bytes(self) -> int: ...


class HistoryProposer(Proposer, ABC):
    """What n-gram and suffix proposers share: an index for each request, extended by what is new since the last call.

    `observe` extends it along with the chunks of the prompt, `propose` by the tokens of the last step. A request whose
    history is not indexed to its end yet (see `MAX_INDEXED_PER_CALL`) has no draft, one that may not draft no index.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._indexes: dict[str, HistoryIndex] = {}

    @classmethod
    @abstractmethod
    def from_config(cls, config: MethodConfig) -> HistoryProposer: ...

    @abstractmethod
    def new_index(self, request: Request) -> HistoryIndex: ...

    def finish(self, request: Request, index: HistoryIndex, token_ids: Sequence[int]) -> None:
        """The answer ended by itself, and not by an abort or an error, with `token_ids`, which `request` lacks yet.

        The one moment at which all of it is known, whatever preemptions went before, and nothing past a stop.
        """

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        draft = Draft()
        budget = MAX_INDEXED_PER_CALL
        for request in inputs.requests:
            max_tokens = min(grant.lengths.get(request.request_id, 0), self.num_speculative_tokens)
            if max_tokens < 1:
                continue
            index, budget = self._extended(request, request.num_tokens, budget)
            if index.num_tokens == request.num_tokens:
                guess = index.draft(request.token_ids, max_tokens)
                if guess.tokens:
                    draft.by_request[request.request_id] = guess
        return draft

    def observe(self, plan: Plan, verdict: Verdict, hidden: Hidden | None) -> None:
        budget = MAX_INDEXED_PER_CALL
        for s in plan.scheduled:
            if s.request.max_draft_tokens == 0:
                continue
            index, budget = self._extended(s.request, s.start + s.num_tokens, budget)
            said = verdict.by_request.get(s.request.request_id)
            if said is not None and said.finish_reason in _ENDED:
                self.finish(s.request, index, said.token_ids)

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    @property
    def state_bytes(self) -> int:
        return sys.getsizeof(self._indexes) + sum(index.num_bytes for index in self._indexes.values())

    def _extended(self, request: Request, end: int, budget: int) -> tuple[HistoryIndex, int]:
        """The request's index, up to `end` as far as `budget` tokens go, and what is left of the budget."""
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = self.new_index(request)
        num_new = min(end - index.num_tokens, budget)
        if num_new > 0:
            index.extend(request.token_ids, index.num_tokens + num_new)
            budget -= num_new
        return index, budget
