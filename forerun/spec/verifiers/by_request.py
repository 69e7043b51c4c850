"""Each request of a step under its own rule: the server's, or a stricter one that the request asks for."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from forerun.sampling.batch import SamplingBatch
from forerun.spec.proposer import Draft
from forerun.spec.verifier import Verdict
from forerun.spec.verifiers.match import BestTokens, MatchVerifier


class RuleByRequest:
    """Hands each request's rows to its rule; the passes over all rows of the step are made once.

    Args:
        own: the server's rule, which gives name and promise.
        others: those that requests may ask for, by `SamplingRows.rule`.
    """

    def __init__(self, own: MatchVerifier, others: Iterable[MatchVerifier]) -> None:
        self.name, self.lossless = own.name, own.lossless
        self.rules = {rule.name: rule for rule in others} | {"": own, own.name: own}

    def verify(self, draft: Draft, target_logits: Tensor, sampling: SamplingBatch) -> Verdict:
        best = BestTokens.of(draft, target_logits, sampling)
        return Verdict(
            {r.request_id: self.rules[r.rule].judge(draft.of(r.request_id), target_logits, r, best) for r in sampling}
        )
