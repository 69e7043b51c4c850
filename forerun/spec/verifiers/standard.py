"""The rule of speculative sampling: accept a drafted token with probability min(1, p / q), else draw from what is left.

Law-lossless: the text of a request follows the target's distribution, but which text it is depends on drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import draw, processed_logprobs
from forerun.sampling.noise import Stream, uniform
from forerun.spec.maths import acceptance_probability, residual_distribution
from forerun.spec.proposer import RequestDraft
from forerun.spec.rules import LOSSLESS
from forerun.spec.verifiers.match import MatchVerifier


class StandardVerifier(MatchVerifier):
    """Accepts with probability 1 - TV(p, q): more often than `match` does for drafts that are drawn at random.

    Takes part where the draft says what each token was drawn from (`RequestDraft.probs`). All else is `match`, which is
    the same rule for a one-hot q: greedy requests, drafts without `probs`, trees (siblings are not independent draws),
    and rows whose q is not above 0 at their own token, so that it cannot be what the token was drawn from.

    The law holds if a drafted token depends on the randomness of its position through q alone. A proposer that cuts
    its drafts must decide before a token is drawn whether it will be part of the draft (by the entropy or the maximum
    of q, say): one that draws first, and drops the unlikely ones, leaves other tokens than those that q tells of.
    """

    name = "standard"
    lossless = LOSSLESS["standard"]

    def next_token(
        self, logits: Tensor, rows: SamplingRows, position: int, draft: RequestDraft, node: int, own: int | None = None
    ) -> int:
        child = node + 1
        if draft.probs is None or draft.parents is not None or child >= len(draft):
            return super().next_token(logits, rows, position, draft, node, own)
        token, draft_probs = draft.tokens[child], draft.probs[child].double()
        if not draft_probs[token] > 0:  # zero or not a number
            return super().next_token(logits, rows, position, draft, node, own)
        target_probs = processed_logprobs(logits, rows.params).double().exp()
        both = target_probs.unsqueeze(0), draft_probs.unsqueeze(0)
        drafted = torch.tensor([token], device=logits.device)
        if self.accepts(float(acceptance_probability(*both, drafted)), rows, position):
            return token
        return self.draw_residual(residual_distribution(*both)[0], rows, position)

    def accepts(self, probability: float, rows: SamplingRows, position: int) -> bool:
        """Whether to keep the drafted token at an output position; a method so that tests can enumerate the outcomes.

        The coin belongs to the draft: rules that look beyond what they accept must not see it again in a later one.
        """
        return uniform(rows.seed, rows.choice, rows.position, Stream.ACCEPT, position - rows.position) < probability

    def draw_residual(self, probs: Tensor, rows: SamplingRows, position: int) -> int:
        """A token from the residual [V], with the target's own noise; a method for the same reason."""
        return draw(probs.log(), rows.seed, rows.choice, position)
