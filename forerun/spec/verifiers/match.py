"""The default rule: the target draws its own token at every row; a drafted token stands if it is that token.

Path-lossless: the text of a request does not depend on drafts, on their lengths or on who drafts. For one-hot drafts
a drafted token x is accepted with probability p(x), as often as rejection sampling would.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.uploads import upload
from forerun.request import FinishReason
from forerun.sampling.batch import SamplingBatch, SamplingRows
from forerun.sampling.distribution import draw, most_likely, processed_logprobs
from forerun.sampling.slots import draw_rows, pack_params
from forerun.spec.config import SpeculativeConfig
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.rules import LOSSLESS
from forerun.spec.verifier import RequestVerdict, Verdict


class BestTokens(NamedTuple):
    """Of each row of a step: the most likely token, and whether the row can be drawn from.

    drawn: whether, of rows of requests that are not greedy, `token_ids` holds the token that the target itself draws:
        on a GPU all rows are drawn at once, on a CPU each when it is asked for.
    """

    token_ids: list[int]
    finite: list[bool]
    drawn: bool = False

    @classmethod
    def of(cls, draft: Draft, logits: Tensor, sampling: SamplingBatch) -> BestTokens:
        """logits: [R, V], all rows of the step."""
        if not logits.is_cuda:
            return cls(*most_likely(logits))
        owners = [place for place, rows in enumerate(sampling) for _ in rows.indices]
        positions = [rows.position + depth for rows in sampling for depth in _depths(draft.of(rows.request_id))]
        params = [pack_params(rows.params, rows.seed, rows.choice, 0) for rows in sampling]
        numbers = upload([owners, positions], torch.int64, logits.device)
        filtered = any(rows.params.filters for rows in sampling)
        drawn = draw_rows(
            logits, numbers[0], numbers[1], upload(params, torch.int32, logits.device), filtered=filtered
        ).tolist()
        return cls(drawn, [token >= 0 for token in drawn], drawn=True)


class MatchVerifier:
    """Keeps the path of drafted tokens that the target draws itself. Greedy is its limit at temperature 0."""

    name = "match"
    lossless = LOSSLESS["match"]

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> MatchVerifier:
        """The rule with the settings that it reads."""
        return cls()

    def verify(self, draft: Draft, target_logits: Tensor, sampling: SamplingBatch) -> Verdict:
        best = BestTokens.of(draft, target_logits, sampling)
        return Verdict({r.request_id: self.judge(draft.of(r.request_id), target_logits, r, best) for r in sampling})

    def judge(self, draft: RequestDraft, logits: Tensor, rows: SamplingRows, best: BestTokens) -> RequestVerdict:
        """The verdict on one request: from the root, follow the child that holds the row's token until there is none.

        Args:
            logits: [R, V], all rows of the step, which `rows` and `best` index.
        """
        verdict = RequestVerdict([], [], num_drafted=len(draft))
        node = -1
        while True:
            token = self.token_at(node, len(verdict.accepted), draft, logits, rows, best)
            if token is None:
                verdict.finish_reason = FinishReason.ERROR
                return verdict
            verdict.token_ids.append(token)
            child = find_child(draft, node, token)
            if child is None:
                return verdict
            verdict.accepted.append(child)
            node = child

    def token_at(
        self, node: int, depth: int, draft: RequestDraft, logits: Tensor, rows: SamplingRows, best: BestTokens
    ) -> int | None:
        """The token at the row of `node`, which lies `depth` below the root; None where it cannot be drawn from."""
        row = rows.first_row + 1 + node
        if not best.finite[row]:
            return None
        if rows.params.greedy:
            return best.token_ids[row]
        own = best.token_ids[row] if best.drawn else None
        return self.next_token(logits[row], rows, rows.position + depth, draft, node, own)

    def next_token(
        self, logits: Tensor, rows: SamplingRows, position: int, draft: RequestDraft, node: int, own: int | None = None
    ) -> int:
        """The token at a drawn row, that of `node`; a drafted child stands if it is that token. Rules differ here.

        Args:
            logits: [V] of the row.
            position: output position that the row decides.
            node: -1 for the root.
            own: the target's own token, where it is drawn already.
        """
        return self.draw_row(logits, rows, position) if own is None else own

    def draw_row(self, logits: Tensor, rows: SamplingRows, position: int) -> int:
        """The target's own token at an output position; a method so that tests can enumerate the draws."""
        return draw(processed_logprobs(logits, rows.params), rows.seed, rows.choice, position)


def _depths(draft: RequestDraft) -> list[int]:
    """Of the root's row and each node's."""
    depths = [0]
    for node in range(len(draft)):
        depths.append(1 + depths[1 + draft.parent(node)])
    return depths


def find_child(draft: RequestDraft, node: int, token_id: int) -> int | None:
    """The child of `node` (-1: the root) that holds this token."""
    if draft.parents is None:
        child = node + 1
        return child if child < len(draft) and draft.tokens[child] == token_id else None
    for child in range(node + 1, len(draft)):
        if draft.parents[child] == node and draft.tokens[child] == token_id:
            return child
    return None
