"""`bench offline`: the same prompts on `LLM`, in this process, and where the time of its steps goes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forerun.bench import counters
from forerun.bench.client import Outcome
from forerun.bench.datasets import Sample
from forerun.bench.load import Run
from forerun.bench.serve import Measured
from forerun.engine.messages import EngineStats, NewRequest, RequestOutput
from forerun.errors import RequestError
from forerun.request import FinishReason, SamplingParams
from forerun.spec.per_request import request_speculation

if TYPE_CHECKING:
    from forerun.llm import LLM

MS = 1e3
DECODE, PROMPT = "decode", "prompt"  # steps that only decode; those that compute a part of a prompt too


@dataclass
class StepTimes:
    """Where the time of steps went, seconds in sum."""

    num_steps: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.target_s + self.verify_s + self.host_s

    def add(self, before: EngineStats, now: EngineStats) -> None:
        """Count what lies between two readings; what is in no part is the host's."""
        draft = now.draft_time_s - before.draft_time_s
        target = now.forward_time_s - before.forward_time_s
        verify = now.verify_time_s - before.verify_time_s
        self.num_steps += now.num_steps - before.num_steps
        self.draft_s += draft
        self.target_s += target
        self.verify_s += verify
        self.host_s += now.step_time_s - before.step_time_s - draft - target - verify

    def per_step_ms(self) -> dict[str, float]:
        """Milliseconds a step of each part, and of all of it."""
        parts = {name.removesuffix("_s"): value for name, value in asdict(self).items() if name != "num_steps"}
        parts["step"] = self.total_s
        return {name: MS * value / max(1, self.num_steps) for name, value in parts.items()}


Profile = dict[str, StepTimes]


@dataclass
class OfflineRun:
    """
    Attributes:
        profile: by kind of step.
        profiled_apart: the profile is of a second run, in which the GPU was waited for after each part.
    """

    measured: Measured
    profile: Profile
    profiled_apart: bool = False


@dataclass
class Loop:
    """Keeps so many requests under way in an engine.

    Args:
        done: called after each request.
        salt: keeps what this loop caches apart from what others did.
    """

    llm: LLM
    params: SamplingParams
    concurrency: int
    done: Callable[[Outcome], None] = lambda outcome: None
    salt: str = ""
    profile: Profile = field(default_factory=lambda: {DECODE: StepTimes(), PROMPT: StepTimes()})

    def run(self, samples: Sequence[Sample], prompts: Sequence[list[int]]) -> Run:
        """Answer all, in order as far as there is room. Ctrl-C ends it with what there is."""
        run, finished = Run(), {}
        waiting = list(reversed(range(len(samples))))
        under_way: dict[str, Outcome] = {}
        start = time.perf_counter()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < self.concurrency:
                    number = waiting.pop()
                    outcome = finished[number] = Outcome(samples[number], num_prompt_tokens=len(prompts[number]))
                    self._submit(number, prompts[number], outcome, under_way)
                self._step(under_way)
        except KeyboardInterrupt:
            run.interrupted = True
            self.llm.engine.abort_requests(list(under_way))
        run.duration_s = time.perf_counter() - start
        run.outcomes = [finished[n] for n in sorted(finished) if finished[n].ok or finished[n].error]
        return run

    def _submit(self, number: int, prompt: list[int], outcome: Outcome, under_way: dict[str, Outcome]) -> None:
        info, name = self.llm.info, f"bench-{number}"
        drafts = request_speculation(
            self.params.speculative_config, info.spec_methods, info.num_spec_tokens, info.rejection_sample_method
        )
        params = self.params
        if outcome.sample.output_len is not None:
            params = replace(params, max_tokens=outcome.sample.output_len)
        new = NewRequest(
            name,
            prompt,
            params,
            number if params.seed is None else params.seed,
            cache_salt=self.salt,
            max_draft_tokens=drafts.max_draft_tokens,
            draft_methods=drafts.draft_methods,
            rejection_sample_method=drafts.rejection_sample_method,
        )
        outcome.start = time.perf_counter()
        try:
            self.llm.engine.add_request(new)
            under_way[name] = outcome
        except RequestError as error:
            outcome.error = str(error)
            self.done(outcome)

    def _step(self, under_way: dict[str, Outcome]) -> None:
        if not under_way:
            return
        prompts = any(outcome.num_output_tokens is None for outcome in under_way.values())
        before = copy.copy(self.llm.stats)
        step = self.llm.engine.step()
        now = time.perf_counter()
        self.profile[PROMPT if prompts else DECODE].add(before, step.stats)
        for output in step.outputs:
            outcome = under_way[output.request_id]
            take(outcome, output, now - outcome.start)
            if output.finish_reason is not None:
                del under_way[output.request_id]
                self.done(outcome)


def take(outcome: Outcome, output: RequestOutput, elapsed_s: float) -> None:
    """Account for what a step brought for a request, as the client accounts for a chunk."""
    outcome.num_output_tokens = outcome.num_tokens + len(output.token_ids)
    outcome.text += output.text
    if outcome.ttft_s is not None:
        outcome.itls_s.append(elapsed_s - outcome.latency_s)
    elif output.token_ids:
        outcome.ttft_s = elapsed_s
    outcome.latency_s = elapsed_s
    outcome.ended = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if output.error is not None:
        outcome.error = output.error
    if output.metrics is not None and output.metrics.speculative_decoding is not None:
        outcome.metrics = {"speculative_decoding": output.metrics.speculative_decoding}


def token_ids(llm: LLM, sample: Sample, *, chat: bool) -> list[int]:
    """The prompt as the model sees it."""
    if not isinstance(sample.prompt, str):
        return sample.prompt
    if chat:
        return llm.tokenizer.apply_chat_template([{"role": "user", "content": sample.prompt}])
    return llm.tokenizer.encode(sample.prompt)


def run_offline(
    llm: LLM,
    samples: Sequence[Sample],
    params: SamplingParams,
    *,
    concurrency: int,
    num_warmups: int = 1,
    chat: bool = True,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> OfflineRun:
    """Warm up on the first prompt, then answer all.

    A GPU works on while the host goes on, so its profile comes from a second run that waits after each part.

    Args:
        params: `max_tokens` is replaced by a sample's own.
        concurrency: most requests under way.
        chat: texts are messages of a user.
    """
    prompts = [token_ids(llm, sample, chat=chat) for sample in samples]
    Loop(llm, params, concurrency, salt="warm-up").run([samples[0]] * num_warmups, [prompts[0]] * num_warmups)
    before = copy.deepcopy(llm.stats.spec)
    loop = Loop(llm, params, concurrency, done)
    measured = Measured(loop.run(samples, prompts))
    if llm.info.speculative_config is not None:
        measured.spec = counters.subtract(llm.stats.spec, before)
        categories = {sample.category for sample in samples} - {""}
        own = {c: [o for o in measured.run.outcomes if o.sample.category == c] for c in categories}
        measured.by_category = {c: counters.from_requests(outcomes) for c, outcomes in own.items()}
        measured.source = "the engine's own figures of each request"
    if not llm.info.device.startswith("cuda") or measured.run.interrupted:
        return OfflineRun(measured, loop.profile)

    import torch

    llm.engine.profile(torch.cuda.synchronize)
    second = Loop(llm, params, concurrency, salt="profile")
    second.run(samples, prompts)
    return OfflineRun(measured, second.profile, profiled_apart=True)


def profile_object(profile: Profile) -> dict[str, Any]:
    """Milliseconds a step by part, for each kind of step that there was."""
    return {kind: {"steps": t.num_steps, **t.per_step_ms()} for kind, t in profile.items() if t.num_steps}
