"""C04: max_tokens that falls into the middle of a draft. What is delivered, reported and counted is one number."""

from __future__ import annotations

import pytest

from forerun.request import FinishReason, SamplingParams
from tests.cases.conftest import MakeEngine, Reference, Serve
from tests.cases.material import DISTINCT, LOOPS, complete, metric
from tests.tiny_engine import run

LIMITS = (1, 2, 3, 5, 8, 9, 17)


def params(limit: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize(
    ("method", "k"), [("self", 1), ("self", 4), ("self", 7), ("self", 16), ("ngram", 5), ("suffix", 8)]
)
def test_exactly_max_tokens_are_delivered_and_counted(method: str, k: int, engines: MakeEngine, ref: Reference) -> None:
    """C04 in the engine: delivered ids, logprobs and the counter agree, and the ids are REF's."""
    engine = engines(method, k)
    prompts = DISTINCT[:2] if method == "self" else LOOPS[2:5]
    for prompt in prompts:
        longest = ref(prompt, params(max(LIMITS)))
        for limit in LIMITS:
            before = engine.stats().generation_tokens
            (result,) = run(engine, [(prompt, params(limit))])
            assert result.token_ids == longest.token_ids[:limit]
            assert len(result.token_ids) == len(result.logprobs) == len(result.drafted) == limit
            assert engine.stats().generation_tokens - before == limit
            assert result.last.finish_reason is FinishReason.LENGTH
            spec = result.last.metrics.speculative_decoding
            assert spec["num_accepted_draft_tokens"] == sum(result.drafted)
            if method == "self":  # drafts are cut to what may still be delivered, and all of them stand
                num_steps = -(-(limit - 1) // (k + 1))
                assert spec["num_draft_tokens"] == spec["num_accepted_draft_tokens"] == limit - 1 - num_steps
    assert engine.stats().spec.num_accepted_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("method", ["self", "ngram"])
def test_usage_logprobs_and_the_counter_say_the_same_number(
    method: str, stream: bool, serve: Serve, ref: Reference
) -> None:
    """C04 over HTTP."""
    prompt = LOOPS[3]
    with serve(method).http() as http:
        drafted = metric(http, "vllm:spec_decode_num_accepted_tokens_total")
        for limit in LIMITS:
            before = metric(http, "vllm:generation_tokens_total")
            answer = complete(http, prompt, max_tokens=limit, ignore_eos=True, logprobs=1, stream=stream)
            assert answer.token_ids == ref(prompt, params(max(LIMITS))).token_ids[:limit]
            assert answer.completion_tokens == len(answer.token_ids) == limit
            assert len(answer.token_logprobs) == len(answer.tokens) == len(answer.top_logprobs) == limit
            assert metric(http, "vllm:generation_tokens_total") - before == limit
            assert answer.finish_reason == "length"
        assert metric(http, "vllm:spec_decode_num_accepted_tokens_total") > drafted
