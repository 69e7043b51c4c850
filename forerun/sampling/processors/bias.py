"""What a request adds to single logits, and the only tokens that it allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from forerun.request import Request
from forerun.sampling.batch import SamplingRows
from forerun.sampling.processors.interface import LogitsProcessor
from forerun.sampling.processors.places import NEGATIVE_INFINITY, Amounts, Ids, Places
from forerun.spec.proposer import Draft


class LogitBias(LogitsProcessor):
    """`logit_bias`: the same at every row."""

    def __init__(self) -> None:
        self._bias: dict[str, tuple[Ids, Amounts]] = {}

    def start(self, request: Request) -> bool:
        bias = request.params.logit_bias
        if not bias:
            return False
        amounts = np.fromiter(bias.values(), np.float32, len(bias))
        self._bias[request.request_id] = np.fromiter(bias, np.int64, len(bias)), amounts
        return True

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        places, added = Places(), []
        for r in rows:
            ids, amounts = self._bias[r.request_id]
            places.add(r.indices, ids)
            added.append(np.tile(amounts, r.num_rows))
        places.on(logits).change(lambda _, values, amounts: values + amounts, np.concatenate(added))

    def forget(self, request_id: str) -> None:
        self._bias.pop(request_id, None)


class AllowedTokens(LogitsProcessor):
    """`allowed_token_ids`: all others are forbidden."""

    def __init__(self) -> None:
        self._allowed: dict[str, Ids] = {}

    def start(self, request: Request) -> bool:
        allowed = request.params.allowed_token_ids
        if allowed is None:
            return False
        self._allowed[request.request_id] = np.array(allowed, np.int64)
        return True

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        places = Places()
        for r in rows:
            places.add(r.indices, self._allowed[r.request_id])
        selected = places.on(logits)
        kept = selected.get()
        for r in rows:
            logits[r.first_row : r.first_row + r.num_rows] = NEGATIVE_INFINITY
        selected.put(kept)

    def forget(self, request_id: str) -> None:
        self._allowed.pop(request_id, None)
