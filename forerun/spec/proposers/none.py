"""Plain decoding: every draft is empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.spec.proposer import Draft, DraftInputs

if TYPE_CHECKING:
    from forerun.engine.plan import Grant, Hidden, Plan
    from forerun.spec.verifier import Verdict


class EmptyProposer:
    """Never guesses. With it the loop is plain decoding."""

    name = "none"
    hidden_taps: tuple[tuple[int, bool], ...] = ()
    state_bytes = 0

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        return Draft()

    def observe(self, plan: Plan, verdict: Verdict, hidden: Hidden | None) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass
