"""The loop: guess, plan, run the target once, keep what stands."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

from forerun.engine.config import EngineConfig
from forerun.engine.messages import EngineInfo, EngineStats, NewRequest, RequestOutput, StepOutput
from forerun.engine.outputs import OutputProcessor
from forerun.engine.plan import Plan
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Scheduler
from forerun.errors import RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.request import Request
from forerun.sampling.logprobs import add_logprobs
from forerun.sampling.processors import LogitsProcessor, LogitsProcessors
from forerun.spec.control import Control
from forerun.spec.proposer import DraftInputs, Proposer
from forerun.spec.stats import SpecCounters
from forerun.spec.verifier import Verdict, Verifier


class Stopwatch:
    """Adds up the time spent in its `with` blocks."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._started


class StepClock:
    """Where the time of all steps went."""

    def __init__(self) -> None:
        self.step = Stopwatch()
        self.draft = Stopwatch()  # of it, proposing and observing


class Engine:
    """Serves requests on one device, step by step. Not thread-safe: one thread calls it.

    `forerun.engine.build.build_engine` makes one from an `EngineConfig`; tests put one together from parts.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        proposer: Proposer,
        verifier: Verifier,
        control: Control,
        tokenizer: Tokenizer,
        info: EngineInfo,
        processors: Sequence[LogitsProcessor] = (),
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.proposer = proposer
        self.verifier = verifier
        self.control = control
        self.processors = LogitsProcessors(processors)
        self.outputs = OutputProcessor(tokenizer)
        self._info = info
        self._eos_token_ids = frozenset(eos_token_ids)
        self._arrivals = itertools.count()
        self._spec = SpecCounters()
        self._totals = EngineStats()
        self._clock = StepClock()

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load everything. Raises ConfigError before weights are read where the settings cannot be served."""
        from forerun.engine.build import build_engine

        return build_engine(config)

    def step(self) -> StepOutput:
        """One pass of the target: every request in it advances by at least one token or one prompt chunk."""
        with self._clock.step:
            grant = self.scheduler.reserve(self.control.lengths(self.scheduler.running))
            with self._clock.draft:
                draft = self.proposer.propose(DraftInputs(grant.requests), grant)
            plan = self.scheduler.schedule(draft)
            result = self.runner.forward(plan)
            self.outputs.note_prompts(plan, result.prompt_logprobs)
            logits = self.processors.apply(plan, result.logits)
            verdict = self.verifier.verify(plan.draft, logits, plan.sampling)
            self.processors.explain(plan, logits, verdict)
            self.outputs.judge(plan, verdict)
            add_logprobs(verdict, result.logits, plan.sampling)
            self.processors.accept(plan, verdict)
            self.runner.keep(plan, verdict)
            with self._clock.draft:
                self.proposer.observe(plan, verdict, result.hidden)
            self.scheduler.commit(plan, verdict)
            outputs = self.outputs.collect(plan, verdict)
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
        self._count(plan, verdict, outputs)
        return StepOutput(outputs, self.stats())

    def add_request(self, new: NewRequest) -> None:
        """Queue a request. Raises RequestError, naming the field, for one that can never be served."""
        request = self._request(new)
        if self.outputs.holds(request.request_id):
            raise RequestError(f"request id {request.request_id!r} is in use: choose another one", "request_id")
        self.processors.start(request)
        self.outputs.start(request)
        self.scheduler.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Stop requests and free their blocks at once; unknown ids are ignored."""
        for request in self.scheduler.abort(request_ids):
            self._forget(request.request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def info(self) -> EngineInfo:
        return self._info

    def stats(self) -> EngineStats:
        """Gauges now and counters since the start."""
        scheduler, stats = self.scheduler, self._totals
        stats.num_requests_running = len(scheduler.running)
        stats.num_requests_waiting = len(scheduler.waiting)
        stats.num_blocks_used = scheduler.target.num_used
        stats.num_blocks = self._info.num_blocks
        stats.num_preemptions = scheduler.num_preemptions
        stats.prompt_tokens = scheduler.num_prompt_tokens
        stats.prefix_cache_queries = scheduler.prefix_cache_queries
        stats.prompt_tokens_cached = stats.prefix_cache_hits = scheduler.prefix_cache_hits
        stats.spec, stats.spec_by_proposer = self._spec.totals, self._spec.by_proposer
        stats.proposer_bytes = self.proposer.state_bytes
        return stats

    def _forget(self, request_id: str) -> None:
        """A request ended: what is kept for it outside of the scheduler goes."""
        self.processors.forget(request_id)
        self.outputs.forget(request_id)

    def _count(self, plan: Plan, verdict: Verdict, outputs: list[RequestOutput]) -> None:
        self._spec.observe(plan, verdict)
        self._totals.num_steps += 1
        self._totals.num_rows += plan.num_rows
        self._totals.generation_tokens += sum(len(output.token_ids) for output in outputs)
        self._totals.step_time_s, self._totals.draft_time_s = self._clock.step.total_s, self._clock.draft.total_s

    def _request(self, new: NewRequest) -> Request:
        limit, num_prompt_tokens = self._info.max_model_len, len(new.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise RequestError("the prompt is empty: it must hold at least one token", "prompt")
        if num_prompt_tokens >= limit:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {limit} and one must be left for "
                f"the answer: shorten it to at most {limit - 1} tokens",
                "prompt",
            )
        if not all(0 <= token < self._info.vocab_size for token in new.prompt_token_ids):
            bad = next(token for token in new.prompt_token_ids if not 0 <= token < self._info.vocab_size)
            raise RequestError(f"token id {bad} is outside the vocabulary [0, {self._info.vocab_size})", "prompt")
        new.params.check_vocabulary(self._info.vocab_size)
        room = limit - num_prompt_tokens
        request = Request(
            new.request_id,
            list(new.prompt_token_ids),
            num_prompt_tokens,
            new.params,
            new.seed,
            choice=new.choice,
            cache_salt=new.cache_salt,
            max_tokens=min(new.params.max_tokens or room, room),
            eos_token_ids=self._eos_token_ids,
            max_draft_tokens=new.max_draft_tokens,
            draft_methods=new.draft_methods,
            arrival=next(self._arrivals),
        )
        request.spec.num_spec_tokens = self._info.num_spec_tokens
        return request
