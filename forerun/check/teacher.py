"""Teacher forcing: the engine's own passes over a text that is given, so that a row of logits costs no generation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.engine.outputs import OutputProcessor
from forerun.engine.plan import Plan
from forerun.request import FinishReason, Request, SamplingParams
from forerun.sampling.distribution import processed_logprobs
from forerun.sampling.noise import gumbel
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.verifier import RequestVerdict, Verdict
from forerun.testing import ScriptedProposer

if TYPE_CHECKING:
    from forerun.sampling.batch import SamplingBatch, SamplingRows

_IDS = itertools.count()


@dataclass(frozen=True)
class Context:
    """Where a distribution is looked at: after a prompt and the first tokens of an answer to it.

    Attributes:
        output: the answer's tokens so far; they count as output for penalties and the like.
        seed, choice: key the noise.
        draft: tokens to verify there, in a chain; None: the proposer's own draft.
    """

    prompt: Sequence[int]
    params: SamplingParams
    output: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0
    draft: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Pass:
    """What the verifier was given at a context.

    Attributes:
        logits: [1 + K, V] float32, processed: the root row and one a drafted token.
    """

    draft: RequestDraft
    logits: Tensor
    rows: SamplingRows


class Teacher:
    """A verifier that makes every request say what was written for it, and keeps what it was given at the end of that.

    The request ends there.
    """

    name = "teacher"
    lossless = "no"

    def __init__(self, scripts: dict[str, tuple[int, ...]]) -> None:
        self._scripts = scripts
        self.passes: dict[str, Pass] = {}

    def verify(self, draft: Draft, target_logits: Tensor, sampling: SamplingBatch) -> Verdict:
        verdict = Verdict()
        for rows in sampling:
            script, own = self._scripts[rows.request_id], draft.of(rows.request_id)
            stands = RequestVerdict([], [0], len(own))
            if rows.position < len(script):
                stands.token_ids = [script[rows.position]]
            else:
                own_logits = target_logits[rows.first_row : rows.first_row + rows.num_rows].clone()
                self.passes[rows.request_id] = Pass(own, own_logits, rows)
                stands.finish_reason = FinishReason.LENGTH
            verdict.by_request[rows.request_id] = stands
        return verdict


class _Unjudged(OutputProcessor):
    """No text, so no stop and no end: what is written for a request may hold either."""

    def judge(self, plan: Plan, verdict: Verdict) -> None:
        return None


def passes(
    engine: Engine, contexts: Sequence[Context], *, speculation: bool = False, method: str | None = None
) -> list[Pass]:
    """The engine's passes at these contexts, many in one batch.

    Args:
        speculation: with drafts: `Context.draft`, or what the proposers draft there. A context needs some output then:
            nobody drafts before the first token.
        method: the one that may draft; None: all of them.
    """
    step = max(1, engine.info().max_num_batched_tokens // (2 * (1 + engine.info().num_spec_tokens)))
    if len(contexts) > step:  # no draft is cut because the pass is full
        parts = (contexts[place : place + step] for place in range(0, len(contexts), step))
        return [found for part in parts for found in passes(engine, part, speculation=speculation, method=method)]
    ids = [f"check-{next(_IDS)}" for _ in contexts]
    scripts = {i: context.output for i, context in zip(ids, contexts, strict=True)}
    drafts = {i: context.draft for i, context in zip(ids, contexts, strict=True) if context.draft is not None}
    teacher = Teacher(scripts)
    with _in_charge(engine, teacher, scripts, drafts if speculation else {}):
        try:
            for request_id, context in zip(ids, contexts, strict=True):
                assert context.output or not speculation
                engine.add_request(
                    NewRequest(
                        request_id,
                        list(context.prompt),
                        context.params,
                        context.seed,
                        choice=context.choice,
                        max_draft_tokens=None if speculation else 0,
                        draft_methods=None if method is None else (method,),
                    )
                )
            while engine.has_work:
                engine.step()
        finally:
            engine.abort_requests(ids)
    return [teacher.passes[i] for i in ids]


@contextmanager
def _in_charge(
    engine: Engine, teacher: Teacher, scripts: dict[str, tuple[int, ...]], drafts: dict[str, tuple[int, ...]]
) -> Iterator[None]:
    """The teacher judges; where drafts are given, they are drafted once the request stands at its context."""

    def script(request: Request, length: int) -> RequestDraft:
        there = request.num_output_tokens == len(scripts[request.request_id])
        return RequestDraft(list(drafts[request.request_id][:length]) if there else [], "teacher")

    verifier, proposer, outputs = engine.verifier, engine.proposer, engine.outputs
    engine.verifier, engine.outputs = teacher, _Unjudged(outputs.tokenizer)
    if drafts:
        engine.proposer = ScriptedProposer(script)
    try:
        yield
    finally:
        engine.verifier, engine.proposer, engine.outputs = verifier, proposer, outputs


def top_two(engine: Engine, context: Context) -> tuple[float, list[int]]:
    """The two best tokens at a context without drafts, and by how much the best is ahead: in logits for a greedy
    request, else in log-probability with the noise of the draw."""
    (found,) = passes(engine, [context])
    scores = found.logits[0].double()
    if not context.params.greedy:
        logprobs = processed_logprobs(found.logits[0], context.params)
        (ids,) = logprobs.isfinite().nonzero(as_tuple=True)
        scores = logprobs.double()
        scores[ids] += gumbel(context.seed, context.choice, len(context.output), ids)
    best = scores.topk(2)
    return float(best.values[0] - best.values[1]), best.indices.tolist()
