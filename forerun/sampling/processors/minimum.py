"""`min_tokens`: nothing ends the text before. Stop strings are the detokenizer's business."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from forerun.request import Request
from forerun.sampling.batch import SamplingRows
from forerun.sampling.processors.interface import LogitsProcessor, paths
from forerun.sampling.processors.places import Ids, Places
from forerun.spec.proposer import Draft


class MinTokens(LogitsProcessor):
    """Forbids the model's end tokens (under `ignore_eos` too, as vLLM does) and `stop_token_ids` at the first
    `min_tokens` positions."""

    def __init__(self) -> None:
        self._ends: dict[str, Ids] = {}

    def start(self, request: Request) -> bool:
        ends = request.eos_token_ids | set(request.params.stop_token_ids)
        if not (request.params.min_tokens and ends):
            return False
        self._ends[request.request_id] = np.array(sorted(ends), np.int64)
        return True

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        places = Places()
        for r in rows:
            left = r.params.min_tokens - r.position
            if left > 0:
                before = enumerate(paths(draft.of(r.request_id)), r.first_row)
                places.add([row for row, path in before if len(path) < left], self._ends[r.request_id])
        places.forbid(logits)

    def forget(self, request_id: str) -> None:
        self._ends.pop(request_id, None)
