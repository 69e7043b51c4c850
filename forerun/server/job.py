"""One HTTP request under way: what is asked of the engine, and what came back so far for each of its choices."""

from __future__ import annotations

import random
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.engine.messages import NewRequest, RequestMetrics, RequestOutput
from forerun.request import DRAWN_SEED_BITS, FinishReason, SamplingParams
from forerun.server.models import GenerationBody
from forerun.server.settings import ServerSettings
from forerun.spec.per_request import RequestSpeculation
from forerun.spec.verifier import TokenLogprobs


@dataclass(slots=True)
class Choice:
    """One answer to one prompt: what came back for it."""

    request: NewRequest
    num_tokens: int = 0
    num_cached_tokens: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    echoed: bool = False  # the prompt has been shown
    text_offset: int = 0  # characters of the tokens that logprobs were given for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first

    @property
    def cumulative_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs)

    def count(self, output: RequestOutput) -> None:
        """Take the figures of an output; all that a stream has to remember."""
        self.num_tokens += len(output.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.metrics = output.metrics

    def keep(self, output: RequestOutput) -> None:
        """Take the contents as well, for an answer in one piece."""
        self.count(output)
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []


@dataclass(slots=True)
class Job:
    """A request with its choices: those of the first prompt, those of the second, and so on."""

    id: str
    created: int
    model: str
    body: GenerationBody
    params: SamplingParams
    choices: list[Choice]

    @property
    def requests(self) -> list[NewRequest]:
        return [choice.request for choice in self.choices]

    @property
    def answers(self) -> list[Choice]:
        """The n choices of each prompt that are given: with `best_of`, those whose tokens are most likely together."""
        made, given = self.params.num_answers, self.params.n
        if made == given:
            return self.choices
        answers: list[Choice] = []
        for first in range(0, len(self.choices), made):
            choices = self.choices[first : first + made]
            answers += sorted(choices, key=lambda choice: -choice.cumulative_logprob)[:given]
        return answers

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, and so do the tokens that were cached before it came."""
        firsts = [c for c in self.choices if c.request.choice == 0]
        prompt = sum(len(c.request.prompt_token_ids) for c in firsts)
        completion = sum(c.num_tokens for c in self.choices)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": sum(c.num_cached_tokens for c in firsts)},
        }


class JobMaker:
    """Gives jobs their ids and, where the user gave none, their seeds.

    Args:
        seed: makes the drawn seeds repeatable; None: fresh ones.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random: random.Random = secrets.SystemRandom() if seed is None else random.Random(seed)

    def make(
        self,
        prefix: str,
        model: str,
        body: GenerationBody,
        params: SamplingParams,
        prompts: Sequence[list[int]],
        name: str,
        drafts: RequestSpeculation,
    ) -> Job:
        """`name` is the id that the user gave, or "". The engine's ids are our own: a name may be given twice."""
        unique = uuid.uuid4().hex
        job_id = f"{prefix}-{name or unique}"
        engine_id = f"{job_id}-{unique}" if name else job_id
        choices = [
            Choice(
                NewRequest(
                    f"{engine_id}-{place}-{choice}",
                    prompt,
                    params.for_engine(),
                    seed,
                    choice=choice,
                    cache_salt=body.cache_salt or "",
                    max_draft_tokens=drafts.max_draft_tokens,
                    draft_methods=drafts.draft_methods,
                )
            )
            for place, prompt in enumerate(prompts)
            for seed in [self._seed(params.seed)]
            for choice in range(params.num_answers)
        ]
        return Job(job_id, int(time.time()), model, body, params, choices)

    def _seed(self, given: int | None) -> int:
        return self._random.getrandbits(DRAWN_SEED_BITS) if given is None else given


def choice_metrics(choice: Choice, settings: ServerSettings) -> dict[str, Any] | None:
    """The `metrics` object of a choice that has ended; None where none was asked for."""
    measured = choice.metrics
    if measured is None:
        return None
    content: dict[str, Any] = _times(measured, choice.num_tokens) if settings.enable_per_request_metrics else {}
    level, spec = settings.per_request_spec_decode_metrics, measured.speculative_decoding
    if level != "none" and spec is not None:
        hidden = () if level == "detailed" else ("per_step_accepted", "per_step_drafted")
        content["speculative_decoding"] = {k: v for k, v in spec.items() if k not in hidden}
    return content or None


def _times(measured: RequestMetrics, num_tokens: int) -> dict[str, float | None]:
    total = measured.time_to_first_token_s + measured.generation_time_s
    return {
        "time_to_first_token_ms": measured.time_to_first_token_s * 1e3,
        "generation_time_ms": measured.generation_time_s * 1e3,
        "queue_time_ms": measured.queue_time_s * 1e3,
        "mean_itl_ms": measured.generation_time_s * 1e3 / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / total if total > 0 else None,
    }
