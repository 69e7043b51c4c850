"""C02: prompts without a match are decoded plainly, a token a step, and leave no trace in the figures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forerun.request import SamplingParams
from tests.cases.conftest import MakeEngine, Reference, Serve
from tests.cases.material import DISTINCT, LOOPS, complete, metric
from tests.tiny_engine import Result, run

LONG_WINDOW = {"prompt_lookup_min": 4, "prompt_lookup_max": 6}
SHORT = SamplingParams(temperature=0, max_tokens=8)  # so far no token of a DISTINCT answer repeats
SPECS: list[tuple[str, dict[str, Any]]] = [("ngram", LONG_WINDOW), ("suffix", {})]


def assert_plain(result: Result) -> None:
    """A token a step, no draft counted, every figure a number."""
    assert all(len(output.token_ids) == 1 for output in result.outputs)
    assert not any(result.drafted)
    spec = result.last.metrics.speculative_decoding
    assert spec["num_draft_tokens"] == spec["num_accepted_draft_tokens"] == spec["num_spec_steps"] == 0
    assert (spec["mean_acceptance_length"], spec["draft_acceptance_rate"]) == (1.0, 0.0)
    assert all(math.isfinite(value) for value in spec.values() if not isinstance(value, list | str))


@pytest.mark.parametrize(("method", "spec"), SPECS, ids=["ngram", "suffix"])
def test_prompts_without_a_match_are_decoded_a_token_a_step(
    method: str, spec: dict[str, Any], engines: MakeEngine, ref: Reference
) -> None:
    """C02: prompts of 1, 2 and 3 tokens, and prompts of all-different tokens."""
    engine = engines(method, spec=spec)
    for prompt in DISTINCT:
        answer = ref(prompt, SHORT).token_ids
        assert len({*prompt, *answer}) == len(prompt) + len(answer), "freeze another prompt"
        (result,) = run(engine, [(prompt, SHORT)])
        assert result.key == ref(prompt, SHORT).key
        assert_plain(result)
    assert engine.stats().spec.num_drafts == 0
    for length in (1, 2, 3):
        prompt = DISTINCT[0][:length]
        (result,) = run(engine, [(prompt, SHORT)])
        assert result.key == ref(prompt, SHORT).key
        if method == "ngram":
            assert_plain(result)


@pytest.mark.parametrize(("method", "spec"), SPECS, ids=["ngram", "suffix"])
@pytest.mark.parametrize("place", range(4))
def test_one_match_in_a_batch_of_four_drafts_for_that_row_only(
    place: int, method: str, spec: dict[str, Any], engines: MakeEngine, ref: Reference
) -> None:
    """C02: a batch in which exactly one prompt has a match, at each place."""
    batch = DISTINCT[:3]
    batch.insert(place, LOOPS[3])
    engine = engines(method, spec=spec)
    results = run(engine, [(prompt, SHORT) for prompt in batch])
    for row, (prompt, result) in enumerate(zip(batch, results, strict=True)):
        assert result.key == ref(prompt, SHORT).key
        if row != place:
            assert_plain(result)
    matched = results[place].last.metrics.speculative_decoding
    assert matched["num_draft_tokens"] == engine.stats().spec.num_draft_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_request_without_drafts_moves_no_counter_and_makes_no_nan(method: str, serve: Serve, ref: Reference) -> None:
    """C02 over HTTP: /metrics and the request's own figures."""
    with serve(method).http() as http:
        names = [f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
        before = [metric(http, name) for name in names]
        for prompt in DISTINCT:
            assert complete(http, prompt, max_tokens=8).token_ids == ref(prompt, SHORT).token_ids
        assert [metric(http, name) for name in names] == before
        body = {"prompt": DISTINCT[0], "max_tokens": 8, "temperature": 0}
        spec = http.post("/v1/completions", json=body).json()["metrics"]["speculative_decoding"]
        assert (spec["num_draft_tokens"], spec["draft_acceptance_rate"]) == (0, 0.0)
