"""C25: requests that lose their blocks, or are only left out of some steps, say what they would have said.

The case's request with a JSON schema is in tests/structured/test_texts.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from forerun.engine.engine import Engine
from forerun.request import SamplingParams
from forerun.sampling.batch import SamplingBatch
from forerun.spec.proposer import Draft, DraftInputs, Grant, RequestDraft
from forerun.spec.verifier import Verdict
from tests.cases.conftest import MakeEngine, Reference
from tests.cases.material import prompt_of
from tests.tiny_engine import Work, run

PROMPT_TOKENS, MAX_TOKENS = 40, 60
BLOCK_BYTES = 8192  # of 16 tokens
POOL: dict[str, Any] = {"kv_cache_memory_bytes": 10 * BLOCK_BYTES, "max_model_len": 120}  # 100 tokens are 7 blocks
METHODS = [("ngram", 4), ("suffix", 8), ("self", 4), ("self", 16)]

WORK: Work = [
    (prompt_of(378, 8, 5), SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)),
    (prompt_of(51, 10, 4), SamplingParams(temperature=0.8, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)),
    (prompt_of(9, PROMPT_TOKENS), SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)),
]


class Spy:
    """Stands before proposer and verifier: only what was proposed in a step may be verified in it."""

    def __init__(self, engine: Engine) -> None:
        self.proposer, self.verifier, self.engine = engine.proposer, engine.verifier, engine
        self.fresh = Draft()
        self.num_verified = 0
        self.earlier: list[RequestDraft] = []
        engine.proposer = self  # type: ignore[assignment]
        engine.verifier = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        for request in inputs.requests:
            assert request.num_computed_tokens == request.num_tokens - 1, "only what is computed to its end may draft"
        self.fresh = self.proposer.propose(inputs, grant)
        made = list(self.fresh.by_request.values())
        assert not any(draft is old for draft in made for old in self.earlier), "a draft of an earlier step"
        self.earlier += made
        return self.fresh

    def verify(self, draft: Draft, logits: Any, sampling: SamplingBatch) -> Verdict:
        for request_id, tokens in draft.by_request.items():
            made = self.fresh.of(request_id)
            assert tokens.tokens == made.tokens[: len(tokens)]
            self.num_verified += len(tokens)
        self.fresh = Draft()
        return self.verifier.verify(draft, logits, sampling)


def assert_equal_to(ref: Reference, work: Work, engine: Engine, **options: Any) -> None:
    for (prompt, params), result in zip(work, run(engine, work, **options), strict=True):
        expected = ref(prompt, params)
        assert result.key == expected.key
        assert result.logprobs == expected.logprobs
        assert len(result.token_ids) == MAX_TOKENS


@pytest.mark.parametrize(("caching", "block_size"), [(True, 16), (False, 4)], ids=["prefix_cache", "small_blocks"])
@pytest.mark.parametrize(("method", "k"), METHODS)
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    method: str, k: int, caching: bool, block_size: int, engines: MakeEngine, ref: Reference
) -> None:
    """C25, first run: a pool for 1.5 requests; no draft made before a preemption is verified after it."""
    engine = engines(method, k, **POOL, block_size=block_size, enable_prefix_caching=caching)
    spy = Spy(engine)
    assert_equal_to(ref, WORK, engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert spy.num_verified == stats.spec.num_draft_tokens > 0
    assert stats.generation_tokens == MAX_TOKENS * len(WORK), "recomputed tokens are not counted again"
    engine.proposer, engine.verifier = spy.proposer, spy.verifier


@pytest.mark.parametrize("budget", [8, 2])
@pytest.mark.parametrize(("method", "k"), METHODS)
def test_requests_left_out_of_some_steps_go_on_where_they_were(
    method: str, k: int, budget: int, engines: MakeEngine, ref: Reference
) -> None:
    """C25, second run: a token budget of 8, so that prompts come in pieces and drafts are cut, and of 2, so that one
    of three decoding requests has no row in a step. Nobody is preempted."""
    engine = engines(method, k, max_num_batched_tokens=budget)
    spy = Spy(engine)
    assert_equal_to(ref, WORK, engine)
    assert engine.stats().num_preemptions == 0
    assert budget == 2 or spy.num_verified > 0
    engine.proposer, engine.verifier = spy.proposer, spy.verifier


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_a_preempted_request_reports_it_and_its_proposer_state_is_dropped(
    method: str, k: int, engines: MakeEngine
) -> None:
    """C25: the counter is the sum of the requests' own figures, and each preemption and each end is told once."""
    engine = engines(method, k, **POOL)
    forgotten: list[str] = []
    forget = engine.scheduler.on_release
    engine.scheduler.on_release = lambda request_id: (forgotten.append(request_id), forget(request_id))[0]
    results = run(engine, WORK)
    preempted = [result.last.metrics.num_preemptions for result in results]
    assert sum(preempted) == engine.stats().num_preemptions > 0
    assert len(forgotten) == sum(preempted) + len(WORK)
