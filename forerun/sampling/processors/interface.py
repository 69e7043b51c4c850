"""What a kind of change to the logits must be able to do. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.request import Request
    from forerun.sampling.batch import SamplingRows
    from forerun.spec.proposer import Draft, RequestDraft


def paths(draft: RequestDraft) -> list[list[int]]:
    """The drafted tokens before each row of a request: none for the root's; for a node's, its ancestors and itself."""
    before: list[list[int]] = [[]]
    for node, token_id in enumerate(draft.tokens):
        before.append([*before[1 + draft.parent(node)], token_id])
    return before


class LogitsProcessor(Protocol):
    """One kind of change, for all requests that ask for it.

    A row's change depends on the request's parameters and on the tokens before the row alone, drafted ones on the path
    to it included: a row that is drafted and one that is not get the same. State of a request follows the tokens that
    stand (`accept`), so that a rejected draft leaves no trace.
    """

    def start(self, request: Request) -> bool:
        """Whether the request asks for this. Its state is made here, before its first token.

        Raises:
            RequestError: it asks for what cannot be done; `param` names the field.
        """
        ...

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        """Change logits in place.

        Args:
            logits: [R, V] float32, all rows of the step.
            rows: those of the requests that asked.
            draft: what was drafted; `draft.of(rows[i].request_id)` says what stands before each drafted row.
        """
        ...

    def accept(self, request: Request, token_ids: Sequence[int]) -> None:
        """These tokens, next in the request's output, stand. They are not in `request.token_ids` yet."""
        return None

    def failure(self, request_id: str) -> str | None:
        """What went wrong where all logits of a row are minus infinity; None: nothing but that all were forbidden."""
        return None

    def forget(self, request_id: str) -> None:
        """The request ended: drop its state. Unknown ids are ignored. A preempted request keeps its state."""
        return None
