"""C01: text that repeats is what n-grams are for; it comes out as without them. Engine, and over HTTP."""

from __future__ import annotations

import pytest

from forerun.models.tokenizer import Tokenizer
from forerun.request import SamplingParams
from tests.cases.conftest import MakeEngine, Reference, Serve
from tests.cases.material import LOOPS, complete, metric, prompt_of
from tests.tiny_engine import run

GREEDY = SamplingParams(temperature=0, max_tokens=32)
TEXTS = ["serving " * 48, "ab" * 100, "the draft is a guess\n" * 20]


@pytest.mark.parametrize(("method", "k"), [("ngram", 4), ("suffix", 8), ("self", 4)])
def test_greedy_answers_to_repeated_and_random_prompts_are_those_of_plain_decoding(
    method: str, k: int, engines: MakeEngine, ref: Reference, tokenizer: Tokenizer
) -> None:
    """C01: EQ for each in one batch (REF is alone), and drafts were really made for the repeated prompts."""
    repeated = [tokenizer.encode(text) for text in TEXTS] + LOOPS
    engine = engines(method, k)
    everything = repeated + [prompt_of(seed, 12) for seed in range(20)]
    for prompt, result in zip(everything, run(engine, [(p, GREEDY) for p in everything]), strict=True):
        assert result.key == ref(prompt, GREEDY).key
        drafted = result.last.metrics.speculative_decoding["num_draft_tokens"]
        assert drafted > 0 or prompt not in repeated
    assert engine.stats().spec.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "self"])
def test_the_drafted_counter_rises_over_http_and_the_text_stays(
    method: str, serve: Serve, ref: Reference, tokenizer: Tokenizer
) -> None:
    """C01 over HTTP."""
    with serve(method).http() as http:
        for text in TEXTS:
            before = metric(http, "vllm:spec_decode_num_draft_tokens_total")
            answer = complete(http, text, max_tokens=32)
            expected = ref(tokenizer.encode(text), GREEDY)
            assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
            assert metric(http, "vllm:spec_decode_num_draft_tokens_total") > before
