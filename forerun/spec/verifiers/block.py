"""Block verification: a chain that was drawn at random is judged as a whole, not token by token.

Law-lossless: the text of a request follows the target's distribution, but which text it is depends on drafts. In
expectation never fewer tokens are accepted than by `standard`, and no rule of this kind accepts more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.request import FinishReason
from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import processed_logprobs
from forerun.spec.maths import block_acceptance, residual_distribution
from forerun.spec.proposer import RequestDraft
from forerun.spec.verifier import RequestVerdict
from forerun.spec.verifiers.match import BestTokens
from forerun.spec.verifiers.standard import StandardVerifier


class BlockVerifier(StandardVerifier):
    """Keeps the longest prefix that passes its test: a token may stand although it, alone, would have been rejected.

    Takes part where `standard` does. All else is `match`: for a one-hot q it accepts n tokens as often as the target
    says them, which no lossless rule can exceed, and block verification gives the same law there.

    A block ends before a token that its q cannot have given, and before a row of the target that cannot be drawn from:
    what stands before it is judged without it.

    The law holds under the condition that `StandardVerifier` states, and if a draft is drawn with noise that no earlier
    draft used: which tokens were drafted beyond the last accepted one takes part in the verdict.
    """

    name = "block"

    def judge(self, draft: RequestDraft, logits: Tensor, rows: SamplingRows, best: BestTokens) -> RequestVerdict:
        length = block_length(draft, rows, best)
        if length == 0:
            return super().judge(draft, logits, rows, best)
        assert draft.probs is not None
        target_probs = torch.stack([self.target_probs(logits, rows, place) for place in range(length)])
        draft_probs = draft.probs[:length].to(target_probs)
        tokens = torch.tensor(draft.tokens[:length], device=logits.device)
        ratios, thresholds = block_acceptance(target_probs, draft_probs, tokens)
        count = self._accepted_length(thresholds.tolist(), rows)
        verdict = RequestVerdict(list(range(count)), draft.tokens[:count], num_drafted=len(draft))
        row, position = rows.first_row + count, rows.position + count
        if not best.finite[row]:
            verdict.finish_reason = FinishReason.ERROR
        elif count == length:
            verdict.token_ids.append(self.draw_row(logits[row], rows, position))
        else:
            scaled = (ratios[count] * target_probs[count]).unsqueeze(0)
            residual = residual_distribution(scaled, draft_probs[count].unsqueeze(0))[0]
            verdict.token_ids.append(self.draw_residual(residual, rows, position))
        return verdict

    def target_probs(self, logits: Tensor, rows: SamplingRows, place: int) -> Tensor:
        """[V] float64, the distribution of the row that follows `place` drafted tokens."""
        return processed_logprobs(logits[rows.first_row + place], rows.params).double().exp()

    def _accepted_length(self, thresholds: list[float], rows: SamplingRows) -> int:
        """The longest prefix whose coin says yes."""
        for count in range(len(thresholds), 0, -1):
            if self.accepts(thresholds[count - 1], rows, rows.position + count - 1):
                return count
        return 0


def block_length(draft: RequestDraft, rows: SamplingRows, best: BestTokens) -> int:
    """Drafted tokens, from the first on, that can be judged as a block; 0 where the rule does not take part."""
    if rows.params.greedy or draft.probs is None or draft.parents is not None:
        return 0
    for place, token in enumerate(draft.tokens):
        if not best.finite[rows.first_row + place] or not draft.probs[place, token] > 0:
            return place
    return len(draft)
