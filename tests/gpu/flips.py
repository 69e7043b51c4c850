"""Two runs of the same work, on two devices: where they differ, and how near the tie was."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.request import MAX_LOGPROBS, SamplingParams
from forerun.sampling.noise import gumbel
from tests.tiny_engine import Result, Work

TOKENS_A_FLIP = 1000


@dataclass(frozen=True)
class Flip:
    """The first place where a request's tokens differ: after it the texts are others.

    gap: by how much the expected token's score was above the other's, noise included; infinite where it is not known.
    """

    request: int
    place: int
    gap: float


def with_logprobs(work: Work) -> Work:
    """The same, each token with the log-probabilities that its score is made of."""
    return [(prompt, dataclasses.replace(params, logprobs=MAX_LOGPROBS)) for prompt, params in work]


def flips_between(results: Sequence[Result], expected: Sequence[Result], work: Work) -> list[Flip]:
    flips = []
    for request, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        pairs = zip(got.token_ids, wanted.token_ids, strict=False)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            flips.append(Flip(request, place, _gap(wanted, place, got.token_ids[place], work[request][1], request)))
        else:
            assert got.token_ids == wanted.token_ids, f"request {request}: of different lengths"
    return flips


def _gap(wanted: Result, place: int, other: int, params: SamplingParams, request: int) -> float:
    entry = wanted.logprobs[place]
    logprobs = dict(entry.top) | {entry.token_id: entry.logprob}
    if other not in logprobs:
        return float("inf")
    scores = [logprobs[entry.token_id], logprobs[other]]
    if not params.greedy:
        seed = params.seed if params.seed is not None else request
        noise = gumbel(seed, 0, place, torch.tensor([entry.token_id, other])).tolist()
        scores = [score / params.temperature + own for score, own in zip(scores, noise, strict=True)]
    return scores[0] - scores[1]


def assert_near_ties_only(
    results: Sequence[Result], expected: Sequence[Result], work: Work, near: float, name: str = ""
) -> None:
    """At most one flip in a thousand tokens, each printed, none without a near tie."""
    flips = flips_between(results, expected, work)
    num_tokens = sum(len(result.token_ids) for result in expected)
    print(f"{name}: {len(flips)} flips in {num_tokens} tokens")
    for flip in flips:
        print(f"flip, {name}: request {flip.request}, token {flip.place}: gap {flip.gap:.2e}")
        assert abs(flip.gap) < near, f"{flip} is no near tie"
    assert len(flips) <= -(-num_tokens // TOKENS_A_FLIP), f"{len(flips)} flips in {num_tokens} tokens"
