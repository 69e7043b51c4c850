"""Presence, frequency and repetition penalties. The first two count the output, the third the prompt as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from forerun.request import Request, SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.sampling.processors.interface import LogitsProcessor, paths
from forerun.sampling.processors.places import Amounts, Ids, Places
from forerun.spec.proposer import Draft

FIRST_CAPACITY = 64


class Penalties(LogitsProcessor):
    """A positive logit is divided by the repetition penalty, another multiplied by it; then the frequency penalty times
    the count is subtracted, and the presence penalty where the count is not 0.

    Source: vLLM's definitions; Keskar et al. 2019, arXiv 1909.05858, for the repetition penalty.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def start(self, request: Request) -> bool:
        params = request.params
        if not (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1):
            return False
        self._seen[request.request_id] = _Seen(params, request.token_ids if params.repetition_penalty != 1 else ())
        return True

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        places, factors, amounts = Places(), [], []
        for r in rows:
            seen = self._seen[r.request_id]
            counts = seen.collect(places, r.first_row, paths(draft.of(r.request_id)))
            factors.append(np.full(len(counts), r.params.repetition_penalty, np.float32))
            amounts.append(counts * np.float32(r.params.frequency_penalty))
            amounts[-1] += (counts > 0) * np.float32(r.params.presence_penalty)
        places.on(logits).change(penalised, np.concatenate(factors), np.concatenate(amounts))

    def accept(self, request: Request, token_ids: Sequence[int]) -> None:
        self._seen[request.request_id].count(token_ids)

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)


def penalised(module: Any, values: Any, factor: Any, amount: Any) -> Any:
    """Logits [N] of tokens that were seen, after the repetition penalty `factor` and less `amount`."""
    return module.where(values > 0, values / factor, values * factor) - amount


class _Seen:
    """The tokens of a request that penalties look at, each once, with how often the output holds it."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int]) -> None:
        self.params = params
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self._ids: Ids = np.zeros(max(FIRST_CAPACITY, 2 * len(self._places)), np.int64)
        self._ids[: len(self._places)] = list(self._places)
        self._counts: Amounts = np.zeros(len(self._ids), np.float32)

    def count(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._counts[place] += 1

    def collect(self, places: Places, first_row: int, before: Sequence[Sequence[int]]) -> Amounts:
        """Add the places of all tokens seen before each row; their counts there.

        Args:
            before: drafted tokens before each row.
        """
        size = len(self._places)
        counts = np.tile(self._counts[:size], (len(before), 1))  # [rows, size]
        new: dict[tuple[int, int], int] = {}  # (row, token id) of drafted tokens that are not known yet
        for row, path in enumerate(before):
            for token_id in path:
                place = self._places.get(token_id)
                if place is not None:
                    counts[row, place] += 1
                else:
                    new[first_row + row, token_id] = new.get((first_row + row, token_id), 0) + 1
        places.add(range(first_row, first_row + len(before)), self._ids[:size])
        if not new:
            return counts.reshape(-1)
        pairs = np.array(list(new), np.int64)
        places.add_pairs(pairs[:, 0], pairs[:, 1])
        return np.concatenate([counts.reshape(-1), np.array(list(new.values()), np.float32)])
