"""What a draft head is to those who draft with it, and who need not know which network it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.attention import AttentionInputs
from forerun.kernels.fused import Linear
from forerun.models.decoder import Attend
from forerun.models.heads.config import HeadConfig


class Write(Protocol):
    def __call__(self, layer: int, inputs: AttentionInputs) -> None:
        """Store the rows' keys and values; the inputs have no queries and are valid during the call only."""
        ...


@dataclass(slots=True)
class HeadOutput:
    """hidden: [T, H], what the next draft step is fed. normed: [T, H], what `Head.logits` takes. May be one tensor."""

    hidden: Tensor
    normed: Tensor


class Head(Protocol):
    """A network that guesses the next tokens from the target's hidden states. It has its own keys and values.

    Row i stands for (token i + 1, the target's state at position i), has position i, and predicts token i + 2. So the
    head's cache has the target's positions: its slot i belongs to the target's slot i. Keys and values made from target
    states stay; those of draft steps are made again from target states once the target has judged them.

    A row's bits do not depend on the other rows of a call, as long as `attend` keeps to that too.

    Attributes:
        config: sizes (`config.layers`, a DecoderConfig: what an attention backend must know), `config.taps`: the
            target states that `combine` takes, and the checkpoint's own number of drafted tokens.
        max_positions: rows at positions 0..max_positions-1 can be computed.
        draft_to_target: [Vd] int64, the target id of each draft id, ascending; None where they are the same.
        mask_state: [H], what stands for the target's state in rows of which nothing is known (P-EAGLE); None: the head
            drafts one token after the other. The token of such rows is `config.mask_token_id`, and K - 1 of them, at
            the positions after the last row with a target state, give drafts 2 to K in the same pass.
        weight_bytes: memory of its own matrices; what it shares with the target does not count.
        notes: what a user should know about how it was loaded, a line each.
    """

    max_positions: int
    draft_to_target: Tensor | None
    mask_state: Tensor | None
    weight_bytes: int
    notes: tuple[str, ...]

    @property
    def config(self) -> HeadConfig: ...

    @property
    def linears(self) -> list[Linear]:
        """Every matrix that it multiplies by, the output head included."""
        ...

    def combine(self, taps: Sequence[Tensor]) -> Tensor:
        """The target's states, [T, Ht] for each of `config.taps`, as the head takes them: [T, H]."""
        ...

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> HeadOutput:
        """Run all layers over T rows.

        Args:
            token_ids: [T] target ids, of the token after the row's position.
            hidden: [T, H], from `combine`, or `HeadOutput.hidden` of the parent row in a draft step. Not written to.
            positions: [T], of the states. They may repeat, as in a tree.
            attend: called once a layer, in order.
        """
        ...

    def fill(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, write: Write) -> None:
        """Leave in the cache what `forward` would, computing no more than that: K and V of a one-layer head.

        `attend` is called for all layers but the last, `write` for the last.
        """
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """`HeadOutput.normed` [R, H] -> [R, Vd] float32, over draft ids."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids of any shape -> target ids. A drafted id must be mapped before it is fed back."""
        ...
