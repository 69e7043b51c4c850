"""Rules with a fault each that has been seen in the wild. `forerun check lossless` must fail every one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import processed_logprobs
from forerun.sampling.noise import Stream, uniform
from forerun.sampling.processors.penalties import Penalties
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.standard import StandardVerifier


class MatchByRank(MatchVerifier):
    """Keeps any drafted token that is among the target's three best."""

    def next_token(
        self, logits: Tensor, rows: SamplingRows, position: int, draft: RequestDraft, node: int, own: int | None = None
    ) -> int:
        found = token_by_rank(logits, draft, node)
        return super().next_token(logits, rows, position, draft, node, own) if found is None else found


class StandardByRank(StandardVerifier):
    """The same, of drafts that say what they were drawn from."""

    def next_token(
        self, logits: Tensor, rows: SamplingRows, position: int, draft: RequestDraft, node: int, own: int | None = None
    ) -> int:
        found = token_by_rank(logits, draft, node)
        return super().next_token(logits, rows, position, draft, node, own) if found is None else found


def token_by_rank(logits: Tensor, draft: RequestDraft, node: int) -> int | None:
    child = node + 1
    if child < len(draft) and draft.parent(child) == node and draft.tokens[child] in logits.topk(3).indices.tolist():
        return draft.tokens[child]
    return None


class OneNoiseAStep(MatchVerifier):
    """Draws all rows of a step with the noise of its first position."""

    def draw_row(self, logits: Tensor, rows: SamplingRows, position: int) -> int:
        return super().draw_row(logits, rows, rows.position)


class FromTheTarget(StandardVerifier):
    """After a rejection draws from the target's distribution, not from what the draft left of it."""

    def next_token(
        self, logits: Tensor, rows: SamplingRows, position: int, draft: RequestDraft, node: int, own: int | None = None
    ) -> int:
        self._target = processed_logprobs(logits, rows.params).exp()
        return super().next_token(logits, rows, position, draft, node, own)

    def draw_residual(self, probs: Tensor, rows: SamplingRows, position: int) -> int:
        return super().draw_residual(self._target, rows, position)


class CoinForTheResidual(StandardVerifier):
    """The coin that rejected a token draws the next one as well."""

    def draw_residual(self, probs: Tensor, rows: SamplingRows, position: int) -> int:
        coin = uniform(rows.seed, rows.choice, position, Stream.ACCEPT)
        return int(torch.searchsorted(probs.cumsum(0), torch.tensor(coin * float(probs.sum())), right=True))


class CoinForTheStep(StandardVerifier):
    """One coin accepts or rejects all tokens of a draft."""

    def accepts(self, probability: float, rows: SamplingRows, position: int, place: int = 0) -> bool:
        return super().accepts(probability, rows, rows.position)


class StalePenalties(Penalties):
    """Does not count the drafted tokens before a row."""

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        # every row as the root of a request without a draft
        alone = [
            SamplingRows(r.request_id, r.params, r.seed, r.choice, row, 1, r.position)
            for r in rows
            for row in range(r.first_row, r.first_row + r.num_rows)
        ]
        super().apply(logits, alone, Draft())
