"""Stand-ins for tests, ours and our users': a target that follows a script, and a proposer that does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.models.decoder import Attend, DecoderOutput
from forerun.request import Request
from forerun.spec.proposer import Draft, DraftInputs, Proposer, RequestDraft

if TYPE_CHECKING:
    from forerun.spec.proposer import Grant

PEAK = 30.0  # logit of the scripted token above all others


class ScriptedTarget:
    """A model whose next token is a function of the last token and its position: `next_token(token_id, position)`."""

    row_multiple = 1
    device = torch.device("cpu")

    def __init__(self, next_token: Callable[[int, int], int], vocab_size: int) -> None:
        self.next_token = next_token
        self.vocab_size = vocab_size

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[tuple[int, bool]] = ()
    ) -> DecoderOutput:
        pairs = zip(token_ids.tolist(), positions.tolist(), strict=True)
        return DecoderOutput(torch.tensor([[float(self.next_token(t, p))] for t, p in pairs]))

    def logits(self, hidden: Tensor, dtype: torch.dtype | None = torch.float32) -> Tensor:
        logits = torch.zeros(hidden.shape[0], self.vocab_size)
        return logits.scatter_(1, hidden.long(), PEAK)


class ScriptedProposer(Proposer):
    """Drafts what `script(request, length)` returns: right, wrong, empty, too long, or a tree."""

    name = "scripted"

    def __init__(self, script: Callable[[Request, int], RequestDraft]) -> None:
        self.script = script
        self.forgotten: list[str] = []

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        return Draft({r.request_id: self.script(r, grant.lengths[r.request_id]) for r in inputs.requests})

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)
