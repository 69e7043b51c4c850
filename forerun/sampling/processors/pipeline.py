"""All kinds of changes, in order, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.request import FinishReason
from forerun.sampling.processors.interface import LogitsProcessor

if TYPE_CHECKING:
    from torch import Tensor

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

    def apply(self, plan: Plan, logits: Tensor) -> Tensor:
        """The logits that tokens are drawn from: `logits` [R, V] itself where nobody asks for a change, else a copy."""
        concerned = [rows for rows in plan.sampling if rows.request_id in self._asked]
        if not concerned:
            return logits
        changed, draft = logits.clone(), plan.draft
        for processor in self._processors:
            rows = [r for r in concerned if processor in self._asked[r.request_id]]
            if rows:
                processor.apply(changed, rows, draft)
        return changed

    def accept(self, plan: Plan, verdict: Verdict) -> None:
        """Tell what stands of each request, after it was cut at its stop and before the scheduler's commit."""
        for s in plan.scheduled:
            if s.samples:
                stands = verdict.by_request[s.request.request_id]
                asked = self._asked.get(s.request.request_id, ())
                if stands.finish_reason is FinishReason.ERROR:
                    stands.fault = next(filter(None, (processor.fault(s.request) for processor in asked)), None)
                for processor in asked:
                    processor.accept(s.request, stands.token_ids)

    def forget(self, request_id: str) -> None:
        self._drop(request_id, self._asked.pop(request_id, ()))

    @staticmethod
    def _drop(request_id: str, processors: Sequence[LogitsProcessor]) -> None:
        for processor in processors:
            processor.forget(request_id)
