"""From logits to the distribution that tokens are drawn from: one function, for the target and for any draft.

It works on one row at a time, so that a row's bits do not depend on how many rows a step has.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from forerun.request import SamplingParams
from forerun.sampling.noise import LEAST_NOISE, MOST_NOISE, Stream, gumbel

NEGATIVE_INFINITY = float("-inf")
TOP_P_CANDIDATES = 1024
ROUNDING = 0.01  # far more than float32 can be off


def most_likely(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Of each row [R, V] the first largest logit's id, or the first NaN's; and whether that logit is finite.

    On a CPU by numpy: its search is up to 25 times as fast as torch's, whose threads then spin for milliseconds where
    the next step wants the cores.
    """
    if not logits.is_cpu:
        best = logits.argmax(dim=-1)
        return best.tolist(), logits.gather(1, best.unsqueeze(1)).isfinite().flatten().tolist()
    rows = logits.numpy()
    ids = rows.argmax(-1)
    return ids.tolist(), np.isfinite(rows[np.arange(len(rows)), ids]).tolist()


def processed_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities after temperature, min-p, top-k and top-p, in this order.

    Args:
        logits: [V] float32.
        params: temperature above 0.
    Returns:
        [V] float32; minus infinity where a token was filtered out. Among equal logits none is preferred: all tokens
        as likely as the last one kept are kept.
    """
    logits = logits / params.temperature
    if params.min_p > 0.0:
        threshold = logits.max() + math.log(params.min_p)
        logits = logits.masked_fill(logits < threshold, NEGATIVE_INFINITY)
    if 0 < params.top_k < logits.shape[0]:
        threshold = logits.topk(params.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, NEGATIVE_INFINITY)
    logprobs = logits.log_softmax(dim=-1)
    if params.top_p < 1.0:
        threshold = _top_p_threshold(logprobs, params.top_p)
        logprobs = logprobs.masked_fill(logprobs < threshold, NEGATIVE_INFINITY).log_softmax(dim=-1)
    return logprobs


def _top_p_threshold(logprobs: Tensor, top_p: float) -> Tensor:
    """Log-probability of the last token of the smallest set that reaches `top_p`."""
    size = logprobs.shape[0]
    for num_candidates in (TOP_P_CANDIDATES, size):  # the head is nearly always enough; both give the same sums
        top = logprobs.topk(min(num_candidates, size)).values
        cumulative = top.exp().cumsum(dim=-1)
        if cumulative[-1] >= top_p:
            break
    reached = int((cumulative < top_p).sum())
    return top[min(reached, top.shape[0] - 1)]


def draw(
    logprobs: Tensor, seed: int, choice: int, position: int, stream: Stream = Stream.TARGET, place: int = 0
) -> int:
    """The token that wins at an output position: argmax of log-probability [V] plus its keyed Gumbel noise.

    A draft that is drawn from its own distribution with the target's stream is coupled: the more alike the two
    distributions are, the more often both draws are the same token. With the draft's stream they are independent.

    Noise is made for the tokens that can win: not for those filtered out, nor for those so unlikely that the most noise
    there is would not lift them over the likeliest token with the least.
    """
    hopeless = logprobs.max() - (MOST_NOISE - LEAST_NOISE + ROUNDING)
    token_ids = (logprobs > hopeless).nonzero().squeeze(1)
    score = logprobs[token_ids].double() + gumbel(seed, choice, position, token_ids, stream, place)
    return int(token_ids[torch.argmax(score)])
