"""Which rows of logits belong to which request, and how each is to be drawn. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.request import Request, SamplingParams


@dataclass(slots=True, frozen=True)
class SamplingRows:
    """The rows of one request: the root row, then one a drafted token, consecutive in the step's logits.

    Attributes:
        request_id, params, seed, choice: of the request.
        first_row: index of the root row in the step's logits.
        num_rows: 1 + number of drafted tokens.
        position: output position that the root row decides (0 for the first generated token). A row whose node has
            depth d decides position + d.
        rule: the verifier's rule that the request asks for; "": the server's.
    """

    request_id: str
    params: SamplingParams
    seed: int
    choice: int
    first_row: int
    num_rows: int
    position: int
    rule: str = ""

    @property
    def indices(self) -> range:
        return range(self.first_row, self.first_row + self.num_rows)

    @classmethod
    def of(cls, request: Request, first_row: int, num_draft_tokens: int) -> SamplingRows:
        return cls(
            request.request_id,
            request.params,
            request.seed,
            request.choice,
            first_row,
            1 + num_draft_tokens,
            request.num_output_tokens,
            request.rejection_sample_method,
        )


SamplingBatch = Sequence[SamplingRows]
