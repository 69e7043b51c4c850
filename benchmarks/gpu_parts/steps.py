"""Steps of a full batch, timed from output to output.

An engine may launch a step and return the outputs of the one before, so a call says little: time is taken where tokens
come out, and divided by the tokens that came.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from peers.common import spread

from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.request import SamplingParams

from .options import SETTLE

WINDOW_TOKENS = 16
SILENT_STEPS = 1000  # calls without a token: the engine hangs
_numbers = itertools.count()


class Server(Protocol):
    """An engine in this process, ours or a peer's."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None: ...

    def step(self) -> Mapping[str, int]:
        """How many new tokens came, by request. May be empty."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    @property
    def has_work(self) -> bool: ...


class Ours:
    """Our engine. What ends a request before it is aborted, or preempts one, is an error: it would be timed too."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_preemptions = engine.stats().num_preemptions
        self._decoding: set[str] = set()
        self._seeds = itertools.count()  # of its own for each request: synthetic acceptance is drawn from it

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(NewRequest(request_id, prompt, params, next(self._seeds)))
        self._decoding.add(request_id)

    def step(self) -> Mapping[str, int]:
        result = self.engine.step()
        for output in result.outputs:
            if output.finish_reason is not None and output.request_id in self._decoding:
                why = output.error or output.finish_reason.value
                raise RuntimeError(f"request {output.request_id} ended while it was timed: {why}")
        if result.stats.num_preemptions > self._num_preemptions:
            raise RuntimeError("requests were preempted while they were timed: the KV cache is too small")
        return {output.request_id: len(output.token_ids) for output in result.outputs if output.token_ids}

    def abort(self, request_ids: Sequence[str]) -> None:
        self._decoding -= set(request_ids)
        self.engine.abort_requests(request_ids)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work


class Moment(NamedTuple):
    """Tokens came out. at_s: when. num_tokens: of the whole batch, so far."""

    at_s: float
    num_tokens: int


class Batch:
    """Requests with random prompts. On entering all prompts are computed and all requests decode; on leaving they end.

    Attributes:
        fill_s: how long that took.
    """

    def __init__(self, server: Server, size: int, prompt: int, vocab_size: int, max_tokens: int) -> None:
        self._server = server
        self.size = size
        self.prompt = prompt
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self.num_tokens = 0
        self.fill_s = 0.0
        self._ids = [f"{size}-{next(_numbers)}" for _ in range(size)]

    def __enter__(self) -> Batch:
        draw = random.Random(self.size)
        prompts = [[draw.randrange(3, self._vocab_size) for _ in range(self.prompt)] for _ in self._ids]
        synchronize()
        started = time.perf_counter()
        for request_id, prompt in zip(self._ids, prompts, strict=True):
            self._server.add(request_id, prompt, self._max_tokens)
        waiting = set(self._ids)
        while waiting:
            waiting -= self._step().keys()
        self.fill_s = time.perf_counter() - started
        return self

    def __exit__(self, *_: object) -> None:
        self._server.abort(self._ids)
        while self._server.has_work:  # a step may be under way
            self._server.step()
        synchronize()

    def watch(self, steps: int) -> list[Moment]:
        """The moments of so many steps, and the one before them."""
        moments: list[Moment] = []
        for _ in range(SETTLE + steps + 1):
            self._step()
            moments.append(Moment(time.perf_counter(), self.num_tokens))
        return moments[SETTLE:]

    def call(self, times: int) -> None:
        for _ in range(times):
            self._server.step()

    def _step(self) -> Mapping[str, int]:
        """The next outputs that are not empty."""
        for _ in range(SILENT_STEPS):
            if new := self._server.step():
                self.num_tokens += sum(new.values())
                return new
        raise RuntimeError(f"no token in {SILENT_STEPS} steps")


def windows(moments: Sequence[Moment], batch: int, tokens: int = WINDOW_TOKENS) -> list[float]:
    """Milliseconds a token and request, of stretches one after the other in which each request got at least so many
    tokens, as a mean. Of all moments where they are too few for one."""
    times, start = [], moments[0]
    for moment in moments[1:]:
        gained = (moment.num_tokens - start.num_tokens) / batch
        if gained >= tokens:
            times.append(1000 * (moment.at_s - start.at_s) / gained)
            start = moment
    return times or [_mean_ms(moments, batch)]


def _mean_ms(moments: Sequence[Moment], batch: int) -> float:
    first, last = moments[0], moments[-1]
    return 1000 * (last.at_s - first.at_s) * batch / (last.num_tokens - first.num_tokens)


def step_ms(moments: Sequence[Moment]) -> float:
    """Mean milliseconds of a step."""
    return 1000 * (moments[-1].at_s - moments[0].at_s) / (len(moments) - 1)


@dataclass(frozen=True)
class Timing:
    """Of the same work several times.

    Attributes:
        ms: a token and request: median, lowest and highest of windows.
        tokens_per_s: of the whole batch.
        step_ms: mean of a step.
        context: mean tokens of a request.
        tokens_a_step: of a request.
    """

    ms: dict[str, float]
    tokens_per_s: float
    step_ms: float
    context: float
    tokens_a_step: float

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Moment]], batch: int, prompt: int) -> Timing:
        seconds = sum(moments[-1].at_s - moments[0].at_s for moments in rounds)
        gained = sum(moments[-1].num_tokens - moments[0].num_tokens for moments in rounds)
        steps = sum(len(moments) - 1 for moments in rounds)
        contexts = [prompt + (m[0].num_tokens + m[-1].num_tokens) / 2 / batch for m in rounds]
        return cls(
            ms=spread([ms for moments in rounds for ms in windows(moments, batch)]),
            tokens_per_s=gained / seconds,
            step_ms=1000 * seconds / steps,
            context=sum(contexts) / len(contexts),
            tokens_a_step=gained / steps / batch,
        )


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def counters(engine: Engine) -> dict[str, int]:
    """Counters as they are now: the engine's own object changes."""
    stats = engine.stats()
    return {
        "steps": stats.num_steps,
        "rows": stats.num_rows,
        "drafts": stats.spec.num_drafts,
        "accepted": stats.spec.num_accepted_tokens,
    }


def counted_since(engine: Engine, before: Mapping[str, int]) -> dict[str, int]:
    """What was counted since `counters`."""
    return {name: count - before[name] for name, count in counters(engine).items()}
