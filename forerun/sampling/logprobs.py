"""Log-probabilities of the tokens that stand, under the target's raw distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.spec.verifier import TokenLogprobs, Verdict

if TYPE_CHECKING:
    from forerun.sampling.batch import SamplingBatch


def add_logprobs(verdict: Verdict, logits: Tensor, sampling: SamplingBatch) -> None:
    """Fill `RequestVerdict.logprobs` where a request asks for it: one entry for each token that stands.

    Args:
        logits: [R, V] float32, as the model gave them.
        sampling: the rows of the same step.
    """
    for rows in sampling:
        if not rows.params.wants_logprobs:
            continue
        stands = verdict.by_request[rows.request_id]
        nodes = [-1, *stands.accepted]
        stands.logprobs = [
            token_logprobs(
                logits[rows.first_row + 1 + node], token, rows.params.logprobs or 0, rows.params.logprob_token_ids
            )
            for node, token in zip(nodes, stands.token_ids, strict=False)  # the last accepted may have no successor
        ]


def token_logprobs(logits: Tensor, token_id: int, num_top: int, others: Sequence[int] = ()) -> TokenLogprobs:
    """Log-probabilities of one row [V]: of `token_id`, and of `others` or, where there are none, of the `num_top` most
    likely tokens."""
    logprobs = logits.log_softmax(dim=-1)
    logprob = logprobs[token_id]
    top: list[tuple[int, float]] = []
    if others:
        ids = torch.tensor(others, device=logits.device)
        top = list(zip(others, logprobs[ids].tolist(), strict=True))
    elif num_top:
        values, ids = torch.topk(logprobs, num_top)
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprob), 1 + int((logprobs > logprob).sum()), top)
