"""The loop: guess, plan, run the target once, keep what stands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from forerun.engine.config import EngineConfig
from forerun.engine.device_step import DeviceStep, Verdicts
from forerun.engine.messages import EngineInfo, EngineStats, NewRequest, RequestOutput, StepOutput
from forerun.engine.outputs import OutputProcessor
from forerun.engine.plan import ForwardResult, Plan
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Scheduler
from forerun.errors import RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.request import Request
from forerun.sampling.logprobs import add_logprobs
from forerun.sampling.processors import LogitsProcessor, LogitsProcessors
from forerun.spec.control import Control
from forerun.spec.proposer import Draft, DraftInputs, Grant, Proposer
from forerun.spec.rules import LOSSLESS
from forerun.spec.stats import SpecCounters, Stopwatch
from forerun.spec.verifier import Verdict, Verifier


class StepClock:
    """Where the time of all steps went."""

    def __init__(self) -> None:
        self.step = Stopwatch()
        self.draft = Stopwatch()  # of it, proposing and observing
        self.forward = Stopwatch()  # of it, the target's pass
        self.verify = Stopwatch()  # of it, judging drafts and drawing tokens

    def wait_for(self, device: Callable[[], object]) -> None:
        for watch in (self.step, self.draft, self.forward, self.verify):
            watch.wait = device

    def read(self, stats: EngineStats) -> None:
        stats.step_time_s, stats.draft_time_s = self.step.total_s, self.draft.total_s
        stats.forward_time_s, stats.verify_time_s = self.forward.total_s, self.verify.total_s


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched. result: what the host looks at; None where all is judged on the device."""

    plan: Plan
    verdict: Verdict | Verdicts
    result: ForwardResult | None = None


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
        device_step: DeviceStep | None = None,
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
        self.device_step = device_step  # None: every step is read before the next
        self._on_device = proposer, verifier  # whose work the device step does; others, put in their places, do it here
        self._flight: Flight | None = None
        self._on_host: set[str] = set()  # requests of which the host has to see each step

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load everything. Raises ConfigError before weights are read where the settings cannot be served."""
        from forerun.engine.build import build_engine

        return build_engine(config)

    def step(self) -> StepOutput:
        """One pass of the target: every request in it advances by at least one token or one prompt chunk.

        Where nothing of a step has to be known before the next is launched, the device is given that one first: what
        this call returns is then of the step before.
        """
        with self._clock.step:
            ahead = self._runs_ahead()
            outputs = [] if ahead else self._land()
            ahead = ahead or self._runs_ahead()  # what stood in the way may be gone
            launched = self._launch(ahead)
            self._totals.num_steps_ahead += launched is not None and self._flight is not None
            outputs += self._land()
            self._flight = launched
            outputs += [] if ahead else self._land()
        self._clock.read(self._totals)
        return StepOutput(outputs, self.stats())

    def _launch(self, ahead: bool) -> Flight | None:
        """Guess, plan, run the target once; None where there is nothing to compute."""
        lengths = self.control.lengths(self.scheduler.running)
        grant = self.scheduler.reserve(lengths)
        with self._clock.draft:
            draft = self._propose(grant, ahead)
        plan = self.scheduler.schedule(draft)
        if self._info.num_spec_tokens:
            self._spec.note_missing(plan, lengths, grant, draft)
        flight = self._run(plan, ahead) if plan.scheduled else None
        self.scheduler.advance(plan)
        return flight

    def _propose(self, grant: Grant, ahead: bool) -> Draft:
        if ahead and self.device_step is not None:
            return self.device_step.propose(grant)
        return self.proposer.propose(DraftInputs(grant.requests), grant)

    def _run(self, plan: Plan, ahead: bool) -> Flight:
        if self.device_step is not None:
            if ahead:
                with self._clock.forward:
                    return Flight(plan, self.device_step.run(plan))
            self.device_step.slots.leave(plan)
        with self._clock.forward:
            result = self.runner.forward(plan)
        self.outputs.note_prompts(plan, result.prompt_logprobs)
        with self._clock.verify:
            logits = self.processors.apply(plan, result.logits)
            verdict = self.verifier.verify(plan.draft, logits, plan.sampling)
            self.processors.explain(plan, logits, verdict)
        return Flight(plan, verdict, result)

    def _land(self) -> list[RequestOutput]:
        """Keep what stands of the step in flight, and publish it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        verdict = flight.verdict
        if isinstance(verdict, Verdicts):
            with self._clock.verify:
                verdict = verdict.read()
        plan = flight.plan.still_running()
        self.outputs.judge(plan, verdict)
        if (result := flight.result) is not None:
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
        return outputs

    def _runs_ahead(self) -> bool:
        """Whether the next step can be launched before the one in flight is read."""
        if self.device_step is None or (self.proposer, self.verifier) != self._on_device:
            return False
        if self._on_host and any(r.request_id in self._on_host for r in self.scheduler.next_requests):
            return False
        return self._flight is None or self.scheduler.can_run_ahead()

    def add_request(self, new: NewRequest) -> None:
        """Queue a request. Raises RequestError, naming the field, for one that can never be served."""
        request = self._request(new)
        if self.outputs.holds(request.request_id):
            raise RequestError(f"request id {request.request_id!r} is in use: choose another one", "request_id")
        self.processors.start(request)
        self.outputs.start(request)
        self.scheduler.add(request)
        if self.device_step is not None and not self.device_step.serves(request, self.processors.changes(request)):
            self._on_host.add(request.request_id)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Stop requests and free their blocks at once; unknown ids are ignored."""
        for request in self.scheduler.abort(request_ids):
            self._forget(request.request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._flight is not None

    def info(self) -> EngineInfo:
        return self._info

    def profile(self, wait: Callable[[], object]) -> None:
        """From now on call `wait` after each part of a step that is timed. Without it, work that a GPU was only given
        counts where it is waited for; with it, steps are slower."""
        self._clock.wait_for(wait)

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
        stats.not_drafted = self._spec.not_drafted if self._info.num_spec_tokens else {}
        stats.draft_time_by_proposer = self.proposer.times_s
        stats.proposer_bytes = self.proposer.state_bytes
        return stats

    def _forget(self, request_id: str) -> None:
        """A request ended: what is kept for it outside of the scheduler goes."""
        self.processors.forget(request_id)
        self.outputs.forget(request_id)
        self._on_host.discard(request_id)

    def _count(self, plan: Plan, verdict: Verdict, outputs: list[RequestOutput]) -> None:
        self._spec.observe(plan, verdict)
        self._totals.num_steps += 1
        self._totals.num_rows += plan.num_rows
        self._totals.generation_tokens += sum(len(output.token_ids) for output in outputs)

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
            rejection_sample_method=new.rejection_sample_method,
            arrival=next(self._arrivals),
        )
        request.spec.num_spec_tokens = self._info.num_spec_tokens
        request.spec.rejection_sample_method = rule = new.rejection_sample_method or self._info.rejection_sample_method
        request.spec.lossless = LOSSLESS[rule]
        return request
