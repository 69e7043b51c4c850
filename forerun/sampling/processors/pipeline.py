"""All kinds of changes, in order, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import RequestError
from forerun.request import FinishReason
from forerun.sampling.processors.interface import LogitsProcessor
from forerun.sampling.processors.places import NEGATIVE_INFINITY

if TYPE_CHECKING:
    from forerun.engine.plan import Plan
    from forerun.request import Request
    from forerun.spec.verifier import Verdict


class LogitsProcessors:
    """Knows which requests ask for which processors; a step in which nobody asks costs nothing."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = processors
        self._asked: dict[str, list[LogitsProcessor]] = {}

    def start(self, request: Request) -> None:
        """Raises RequestError, as `LogitsProcessor.start`; no state is left behind then."""
        try:
            asked = [processor for processor in self._processors if processor.start(request)]
        except BaseException:
            self._drop(request.request_id, self._processors)
            raise
        if asked:
            self._asked[request.request_id] = asked

    def changes(self, request: Request) -> bool:
        """Whether a request that was started asks for any."""
        return request.request_id in self._asked

    @torch.inference_mode()
    def apply(self, plan: Plan, logits: Tensor) -> Tensor:
        """The logits [R, V] that tokens are drawn from. They are changed in place, unless a request that asks for a
        change wants log-probabilities too, which are taken from the raw ones: the result is a copy then."""
        concerned = [rows for rows in plan.sampling if rows.request_id in self._asked]
        if not concerned:
            return logits
        changed, draft = logits, plan.draft
        if any(rows.params.wants_logprobs for rows in concerned):
            changed = logits.clone()
        for processor in self._processors:
            rows = [r for r in concerned if processor in self._asked[r.request_id]]
            if rows:
                processor.apply(changed, rows, draft)
        return changed

    def explain(self, plan: Plan, logits: Tensor, verdict: Verdict) -> None:
        """Say why a request has no next token, where it has none because all are forbidden.

        Args:
            logits: as `apply` left them.
        """
        failed = {
            i for i, v in verdict.by_request.items() if v.finish_reason is FinishReason.ERROR
        } & self._asked.keys()
        for rows in plan.sampling if failed else ():
            if rows.request_id not in failed:
                continue
            stands = verdict.by_request[rows.request_id]
            row = logits[rows.first_row + 1 + (stands.accepted[-1] if stands.accepted else -1)]
            if bool((row == NEGATIVE_INFINITY).all()):
                faults = (processor.fault(rows.request_id) for processor in self._asked[rows.request_id])
                position = rows.position + len(stands.accepted)
                stands.fault = next(filter(None, faults), None) or RequestError(
                    f"no token may stand at output position {position}: allowed_token_ids, bad_words, min_tokens and "
                    "the like forbid all of them"
                )

    def accept(self, plan: Plan, verdict: Verdict) -> None:
        """Tell what stands of each request, after it was cut at its stop and before the scheduler's commit."""
        for s in plan.scheduled:
            if s.samples:
                stands = verdict.by_request[s.request.request_id]
                asked = self._asked.get(s.request.request_id, ())
                for processor in asked:
                    processor.accept(s.request, stands.token_ids)

    def forget(self, request_id: str) -> None:
        self._drop(request_id, self._asked.pop(request_id, ()))

    @staticmethod
    def _drop(request_id: str, processors: Sequence[LogitsProcessor]) -> None:
        for processor in processors:
            processor.forget(request_id)
