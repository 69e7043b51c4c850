"""LOSSY: a drafted token that the target would not have said may stand, where the target was unsure and soon agrees.

The text does not follow the target's distribution. Source: FLy, "training-free loosely speculative decoding" (2025), in
the form that vLLM gives it: an entropy gate, then a window of drafted tokens that must all stand.
"""

from __future__ import annotations

from torch import Tensor

from forerun.request import FinishReason
from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import processed_logprobs
from forerun.spec.config import SpeculativeConfig
from forerun.spec.maths import top_entropy
from forerun.spec.proposer import RequestDraft
from forerun.spec.rules import LOSSLESS
from forerun.spec.verifier import RequestVerdict
from forerun.spec.verifiers.match import BestTokens
from forerun.spec.verifiers.standard import StandardVerifier


class FlyVerifier(StandardVerifier):
    """`standard` (for one-hot drafts `match`), whose rejections may be deferred.

    A rejection at token i is deferred if the target could have said the token at all, the entropy of its row reaches
    the threshold, and `window` drafted tokens follow. If all of these pass the usual test, token i and they stand, and
    the walk goes on; else the text is cut at i, with the token that the rejection gave. Trees are judged without
    deferrals, as it looks along a chain.

    Args:
        window: drafted tokens that must stand after a deferral.
        entropy_threshold: least entropy of a row, nats.
        entropy_top_k: most likely tokens of a row that its entropy is summed over. Of a greedy request it is taken at
            temperature 1.
    """

    name = "fly"
    lossless = LOSSLESS["fly"]

    def __init__(self, window: int, entropy_threshold: float, entropy_top_k: int) -> None:
        self.window = window
        self.entropy_threshold = entropy_threshold
        self.entropy_top_k = entropy_top_k

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> FlyVerifier:
        window, threshold, top_k = config.fly_window_size, config.fly_entropy_threshold, config.fly_entropy_top_k
        assert window is not None, "complete() must come first"
        assert threshold is not None
        assert top_k is not None
        return cls(window, threshold, top_k)

    def judge(self, draft: RequestDraft, logits: Tensor, rows: SamplingRows, best: BestTokens) -> RequestVerdict:
        if draft.parents is not None:
            return super().judge(draft, logits, rows, best)
        verdict = RequestVerdict([], [], num_drafted=len(draft))
        deferred: tuple[int, int] | None = None  # the place, and the token that the target gave there
        for place in range(len(draft) + 1):
            token = self.token_at(place - 1, place, draft, logits, rows, best)
            stands = place < len(draft) and token == draft.tokens[place]
            if not stands:
                if deferred is not None:
                    return _cut(verdict, *deferred)
                if token is None:
                    verdict.finish_reason = FinishReason.ERROR
                    return verdict
                if not self._defers(draft, place, logits[rows.first_row + place], rows):
                    verdict.token_ids.append(token)
                    return verdict
                deferred = place, token
                verdict.loose.append(place)
            elif deferred is not None and place == deferred[0] + self.window:
                deferred = None
            verdict.accepted.append(place)
            verdict.token_ids.append(draft.tokens[place])
        raise AssertionError("no drafted token follows the last row")

    def _defers(self, draft: RequestDraft, place: int, logits: Tensor, rows: SamplingRows) -> bool:
        """Whether the rejection at `place` is only to be decided after the window. logits: [V] of its row."""
        if place + self.window >= len(draft):
            return False
        token = draft.tokens[place]
        if draft.probs is not None and not draft.probs[place, token] > 0:
            return False
        probs = (logits.log_softmax(-1) if rows.params.greedy else processed_logprobs(logits, rows.params)).exp()
        return bool(probs[token] > 0) and top_entropy(probs, self.entropy_top_k) >= self.entropy_threshold


def _cut(verdict: RequestVerdict, place: int, token: int) -> RequestVerdict:
    """The window did not stand: what came from `place` on goes, and the target's own token takes its place."""
    verdict.loose.remove(place)
    del verdict.accepted[place:], verdict.token_ids[place:]
    verdict.token_ids.append(token)
    return verdict
