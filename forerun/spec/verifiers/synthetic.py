"""FOR BENCHMARKS ONLY: drafted tokens are accepted by chance, at rates that are given. The text is not the target's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.request import FinishReason
from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import processed_logprobs
from forerun.spec.config import SpeculativeConfig
from forerun.spec.maths import residual_distribution
from forerun.spec.proposer import RequestDraft
from forerun.spec.rules import LOSSLESS
from forerun.spec.verifier import RequestVerdict
from forerun.spec.verifiers.match import BestTokens
from forerun.spec.verifiers.standard import StandardVerifier


class SyntheticVerifier(StandardVerifier):
    """Accepts the first i drafted tokens with a chance that is given, whatever they are, for greedy and drawn alike.

    A rejection gives the most likely token (greedy) or a draw from the residual. Trees are judged by `match`.

    Args:
        rates: entry i is the chance that the first i + 1 drafted tokens all stand; not increasing.
    """

    name = "synthetic"
    lossless = LOSSLESS["synthetic"]

    def __init__(self, rates: Sequence[float]) -> None:
        before = [1.0, *rates]
        self.conditional = [now / last if last else 0.0 for now, last in zip(rates, before, strict=False)]

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> SyntheticVerifier:
        return cls(config.acceptance_rates)

    def judge(self, draft: RequestDraft, logits: Tensor, rows: SamplingRows, best: BestTokens) -> RequestVerdict:
        if draft.parents is not None:
            return super().judge(draft, logits, rows, best)
        verdict = RequestVerdict([], [], num_drafted=len(draft))
        count = 0
        while count < min(len(draft), len(self.conditional)):
            if not self.accepts(self.conditional[count], rows, rows.position + count):
                break
            count += 1
        verdict.accepted, verdict.token_ids = list(range(count)), draft.tokens[:count]
        row, position = rows.first_row + count, rows.position + count
        if not best.finite[row]:
            verdict.finish_reason = FinishReason.ERROR
        elif rows.params.greedy:
            verdict.token_ids.append(best.token_ids[row])
        elif count == len(draft):
            verdict.token_ids.append(self.draw_row(logits[row], rows, position))
        else:
            residual = self._residual(draft, count, logits[row], rows)
            verdict.token_ids.append(self.draw_residual(residual, rows, position))
        return verdict

    def _residual(self, draft: RequestDraft, place: int, logits: Tensor, rows: SamplingRows) -> Tensor:
        """[V] float64: what is left of the target's row without the draft's, a one-hot one where none is given."""
        target = processed_logprobs(logits, rows.params).double().exp()
        if draft.probs is None:
            q = torch.zeros_like(target)
            q[draft.tokens[place]] = 1.0
        else:
            q = draft.probs[place].to(target)
        return residual_distribution(target.unsqueeze(0), q.unsqueeze(0))[0]
