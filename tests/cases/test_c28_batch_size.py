"""C28: draft lengths by the number of decoding requests, live: the text stays, K follows, drafting comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.request import Request, SamplingParams
from forerun.spec.config import SpeculativeConfig
from forerun.spec.control import STEPS_TO_RISE, make_control
from forerun.spec.proposer import Draft, DraftInputs, Grant, Proposer
from tests.cases.conftest import MakeEngine, Reference
from tests.cases.material import LOOPS, prompt_of
from tests.tiny_engine import Result, finish

TABLE = [[1, 2, 5], [4, 8, 2], [10, 64, 0]]
LONG_PROMPTS = [prompt_of(700 + seed, 90) for seed in range(3)]  # several chunks each
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Watched:
    """A proposer that says how far it was let go in each step, and with how many requests decoding."""

    def __init__(self, inner: Proposer, engine: Engine) -> None:
        self._inner, self._engine = inner, engine
        self.steps: list[tuple[int, int]] = []  # (decoding requests, longest grant)

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        assert all(request.decoding for request in inputs.requests)
        decoding = [request for request in self._engine.scheduler.running if request.decoding]
        self.steps.append((len(decoding), max(grant.lengths.values(), default=0)))
        return self._inner.propose(inputs, grant)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def make(engines: MakeEngine, method: str) -> Engine:
    """An engine that drafts by the table: n-grams, or what the target itself says next."""
    if method == "ngram":
        engine = engines("ngram", 5, spec={"num_speculative_tokens_per_batch_size": TABLE})
    else:
        engine = engines("self", 5)
        spec = {"method": "suffix", "num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": TABLE}
        engine.control = make_control(SpeculativeConfig.parse(spec))
    engine.proposer = Watched(engine.proposer, engine)  # type: ignore[assignment]
    return engine


def rising_and_falling(engine: Engine) -> dict[str, tuple[Sequence[int], SamplingParams, Result]]:
    """One request, then eleven more with long prompts among them, then, as they end, one again."""
    served: dict[str, tuple[Sequence[int], SamplingParams, Result]] = {}

    def add(name: str, prompt: Sequence[int], max_tokens: int) -> None:
        params = dataclasses.replace(PARAMS, max_tokens=max_tokens)
        served[name] = prompt, params, Result()
        engine.add_request(NewRequest(name, list(prompt), params, 0))

    def step() -> None:
        for output in engine.step().outputs:
            served[output.request_id][2].add(output)
        engine.scheduler.check_integrity()

    add("first", LOOPS[2], 180)
    for _ in range(4):
        step()
    for place in range(11):
        prompt = LONG_PROMPTS[place % 3] if place % 4 == 3 else LOOPS[place % len(LOOPS)]
        add(f"r{place}", prompt, 30 + 2 * place)
        if place % 3 == 2:
            step()
    finish(engine, {name: result for name, (_, _, result) in served.items()})
    return served


@pytest.mark.parametrize("method", ["ngram", "self"])
def test_k_follows_the_batch_and_the_text_does_not(method: str, engines: MakeEngine, ref: Reference) -> None:
    """C28: traffic of 1 -> 12 -> 1 with long prompts mixed in."""
    engine = make(engines, method)
    served = rising_and_falling(engine)
    for name, (prompt, params, result) in served.items():
        assert result.key == ref(list(prompt), params).key, name

    allowed = {count: next(k for start, _, k in reversed(TABLE) if count >= start) for count in range(1, 13)}
    steps = [(count, k) for count, k in engine.proposer.steps if count]  # type: ignore[attr-defined]
    assert max(count for count, _ in steps) >= 10
    assert all(k <= allowed[count] for count, k in steps)
    silent = [k for count, k in steps if count >= 10]
    assert silent
    assert not any(silent)

    # With one request left K is the whole again after the steps that it waits, and what is drafted then is right.
    tail = [k for _, k in steps[-40:]]
    assert tail.count(5) > 10
    drafted = served["first"][2].last.metrics.speculative_decoding["per_step_drafted"]  # type: ignore[union-attr,index]
    accepted = served["first"][2].last.metrics.speculative_decoding["per_step_accepted"]  # type: ignore[union-attr,index]
    if method == "self":
        assert drafted == accepted
        assert drafted[-5:-1] == [5] * 4


def test_prompts_under_way_do_not_lower_k(engines: MakeEngine) -> None:
    """C28: eight prompts of many chunks beside one decoding request."""
    engine = make(engines, "self")
    results = {name: Result() for name in ("first", *(f"p{i}" for i in range(9)))}
    engine.add_request(NewRequest("first", list(LOOPS[2]), dataclasses.replace(PARAMS, max_tokens=60), 0))
    for _ in range(2):
        for output in engine.step().outputs:
            results[output.request_id].add(output)
    for i in range(9):
        engine.add_request(NewRequest(f"p{i}", prompt_of(800 + i, 100), dataclasses.replace(PARAMS, max_tokens=1), 0))
    finish(engine, results)
    beside = [k for count, k in engine.proposer.steps if count == 1]  # type: ignore[attr-defined]
    assert len(beside) > STEPS_TO_RISE
    assert beside[:8] == [5] * 8


def test_at_k_0_no_block_is_kept_for_a_draft(engines: MakeEngine) -> None:
    """C28: requests that end at a block's border hold no block beyond it."""
    engine = engines("ngram", 5, spec={"num_speculative_tokens_per_batch_size": [[1, 1, 0]]})
    result = {"r": Result()}
    engine.add_request(NewRequest("r", list(LOOPS[2]), PARAMS, 0))
    while engine.has_work:
        for output in engine.step().outputs:
            result["r"].add(output)
        for request in engine.scheduler.running:
            assert len(request.caches[0].blocks) == blocks(request, engine)
    assert engine.stats().spec.num_draft_tokens == 0


def blocks(request: Request, engine: Engine) -> int:
    return -(-request.num_computed_tokens // engine.scheduler.block_size)
