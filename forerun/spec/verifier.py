"""What a verifier is given and what it gives back. `verifiers/` holds one rule a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from forerun.errors import RequestError
from forerun.request import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.sampling.batch import SamplingBatch
    from forerun.spec.proposer import Draft


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token under the target's raw distribution.

    `top` holds (token id, logprob), most likely first; the emitted token is in it or stands beside it with its `rank`
    (1 is the most likely).
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class RequestVerdict:
    """What stands of one request's draft.

    Attributes:
        accepted: indices of the accepted nodes in the request's draft, root to leaf.
        loose: those of them that the target's own rule had rejected: lossy rules only.
        token_ids: the accepted tokens and the one that follows them; the one is missing where the target gave numbers
            that are not finite, and `finish_reason` is ERROR then.
        num_drafted: drafted tokens that were verified.
        finish_reason, stop_reason, text: filled where the tokens are turned into text and judged for stops.
        fault: with ERROR, what of the request's own was to blame; None: nothing of it.
        logprobs: one entry a token where asked for; filled afterwards, from the raw logits.
    """

    accepted: list[int]
    token_ids: list[int]
    num_drafted: int
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str = ""
    fault: RequestError | None = None
    loose: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """What stands of every draft of a step, by request id: an entry for each request that had logits."""

    by_request: dict[str, RequestVerdict] = field(default_factory=dict)


class Verifier(Protocol):
    """Decides which drafted tokens stand, and draws the token that follows them."""

    name: str
    lossless: str
    """"path" (same seed, same text), "law" (same distribution) or "no", see `spec/rules.py`."""

    def verify(self, draft: Draft, target_logits: Tensor, sampling: SamplingBatch) -> Verdict:
        """Judge every draft of a step.

        Args:
            draft: the drafts whose rows were computed.
            target_logits: [R, V] float32, as the logits processors left them; for each request of `sampling` its root
                row and then a row a drafted token.
            sampling: parameters, seeds and output positions of the same rows.
        """
        ...
