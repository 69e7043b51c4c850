"""From verdicts to text: judges stops before anything is published, so that no token past a stop reaches a cache, a
counter or a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forerun.engine.detokenizer import Detokenizer
from forerun.engine.messages import RequestMetrics, RequestOutput
from forerun.engine.plan import Plan
from forerun.models.tokenizer import Tokenizer
from forerun.request import FinishReason, Request
from forerun.spec.verifier import RequestVerdict, TokenLogprobs, Verdict


class OutputProcessor:
    """Holds each request's text state from its start to its end, preemptions included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._detokenizers: dict[str, Detokenizer] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}  # until the first output

    def start(self, request: Request) -> None:
        # An output goes on where its prompt ends: a leading space is the text's own
        self._detokenizers[request.request_id] = Detokenizer(
            self.tokenizer, request.params, request.eos_token_ids, strip_leading=False
        )

    def holds(self, request_id: str) -> bool:
        return request_id in self._detokenizers

    def forget(self, request_id: str) -> None:
        self._detokenizers.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    def note_prompts(self, plan: Plan, found: Mapping[str, Sequence[TokenLogprobs]]) -> None:
        """Take the log-probabilities of prompts' tokens, chunk by chunk. After a preemption some come again."""
        for s in plan.scheduled:
            if (entries := found.get(s.request.request_id)) is not None:
                known = self._prompt_logprobs.setdefault(s.request.request_id, [])
                known += entries[len(known) - s.start :]

    def judge(self, plan: Plan, verdict: Verdict) -> None:
        """Cut every request's tokens at its first stop, and turn what is left into text."""
        for s in plan.scheduled:
            if s.samples:
                self._judge(s.request, verdict.by_request[s.request.request_id])

    def collect(self, plan: Plan, verdict: Verdict) -> list[RequestOutput]:
        """What this step brought for each request; call it after the scheduler's commit."""
        return [self._output(s.request, verdict.by_request[s.request.request_id]) for s in plan.scheduled if s.samples]

    def _judge(self, request: Request, verdict: RequestVerdict) -> None:
        detokenizer = self._detokenizers[request.request_id]
        judgement = detokenizer.push(verdict.token_ids)
        kept = judgement.num_tokens
        verdict.token_ids = verdict.token_ids[:kept]
        verdict.accepted = verdict.accepted[:kept]
        verdict.text = judgement.text
        verdict.finish_reason = judgement.finish_reason or verdict.finish_reason
        verdict.stop_reason = judgement.stop_reason
        if verdict.finish_reason is None and request.num_output_tokens + kept >= request.max_tokens:
            verdict.finish_reason = FinishReason.LENGTH
            verdict.text += detokenizer.finish()

    def _output(self, request: Request, verdict: RequestVerdict) -> RequestOutput:
        output = RequestOutput(
            request.request_id,
            verdict.token_ids,
            verdict.text,
            verdict.logprobs,
            [place < len(verdict.accepted) for place in range(len(verdict.token_ids))],
            self._prompt_logprobs.pop(request.request_id, None),
            verdict.finish_reason,
            verdict.stop_reason,
            request.num_cached_tokens,
        )
        if verdict.finish_reason is FinishReason.ERROR:
            output.bad_request = verdict.error is not None
            output.error = verdict.error or (
                "the model gave numbers that are not finite: its weights or the prompt overflow"
            )
        if verdict.finish_reason is not None:
            output.metrics = _metrics(request)
        return output


def _metrics(request: Request) -> RequestMetrics:
    scheduled = request.first_scheduled_time or request.arrival_time
    first = request.first_token_time or scheduled
    return RequestMetrics(
        queue_time_s=scheduled - request.arrival_time,
        time_to_first_token_s=first - scheduled,
        generation_time_s=(request.last_token_time or first) - first,
        num_preemptions=request.num_preemptions,
        speculative_decoding=request.spec.as_dict(detailed=True) if request.spec.num_spec_tokens else None,
    )
