"""Drafts what a request's grammar forces: the names and marks of a JSON schema, say. No torch here."""

from __future__ import annotations

from forerun.spec.proposer import Constraint, Draft, DraftInputs, Grant, Proposer, RequestDraft


class GrammarProposer(Proposer):
    """Drafts the tokens that must follow, for requests with a grammar; for others nothing.

    The text is forced, its tokens nearly: a model may write the same text with other ones, and then a draft is wrong.
    """

    name = "grammar"

    def __init__(self, constraint: Constraint | None) -> None:
        self._constraint = constraint

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        if self._constraint is None:
            return Draft()
        forced = {r.request_id: self._constraint.forced(r, grant.lengths[r.request_id]) for r in inputs.requests}
        return Draft({request_id: RequestDraft(tokens, self.name) for request_id, tokens in forced.items() if tokens})
