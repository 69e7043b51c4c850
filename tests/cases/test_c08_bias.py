"""C08: a bias against a token that is drafted, a bias for another, and min_p on accepted tokens, under every method."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from forerun.request import SamplingParams
from tests.cases.conftest import MakeEngine, Reference, Serve
from tests.cases.material import DISTINCT, LOOPS, complete, metric
from tests.methods import METHODS, DraftModels
from tests.tiny_engine import run

ROUNDING = 1e-5
MIN_P = 0.3
TEXT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def favourite(ref: Reference, prompt: list[int]) -> int:
    """The most frequent id of REF's answer."""
    return Counter(ref(prompt, TEXT).token_ids).most_common(1)[0][0]


@pytest.fixture(params=["self", *METHODS])
def spec(request: pytest.FixtureRequest, draft_models: DraftModels) -> tuple[str | None, dict[str, Any] | None]:
    """How `engines` makes an engine of each method."""
    name = request.param
    return ("self", None) if name == "self" else (None, METHODS[name](draft_models))


def test_a_bias_changes_what_it_changes_without_drafts(
    spec: tuple[str | None, dict[str, Any] | None], engines: MakeEngine, ref: Reference
) -> None:
    engine = engines(spec[0], spec=spec[1])
    for prompt in (LOOPS[2], LOOPS[0], DISTINCT[2]):
        forbidden, other = favourite(ref, prompt), 77
        prompt = [*prompt, forbidden, *prompt]  # n-grams find it after every window
        cases = [
            SamplingParams(temperature=t, seed=2, max_tokens=24, ignore_eos=True, logit_bias={token_id: bias})
            for t in (0, 0.9)
            for token_id, bias in ((forbidden, -100), (other, 100), (forbidden, 3.0))
        ]
        for params, result in zip(cases, run(engine, [(prompt, params) for params in cases]), strict=True):
            assert result.key == ref(prompt, params).key
            assert params.logit_bias is not None
            if params.logit_bias.get(forbidden) == -100:
                assert forbidden not in result.token_ids
            if other in params.logit_bias:
                assert set(result.token_ids) == {other}
    assert engine.stats().spec.num_draft_tokens > 0


def test_min_p_holds_for_every_delivered_token(
    spec: tuple[str | None, dict[str, Any] | None], engines: MakeEngine, ref: Reference
) -> None:
    engine = engines(spec[0], spec=spec[1])
    num_seeds = 200 if spec[1] is not None and spec[1]["method"] == "ngram" else 8
    cases = [
        SamplingParams(temperature=1, seed=seed, max_tokens=6, ignore_eos=True, min_p=MIN_P, logprobs=1)
        for seed in range(num_seeds)
    ]
    for params, result in zip(cases, run(engine, [(LOOPS[2], params) for params in cases], check=False), strict=True):
        for entry in result.logprobs:
            assert entry.logprob >= entry.top[0][1] + math.log(MIN_P) - ROUNDING
        if params.seed is not None and params.seed < 8:
            assert result.key == ref(LOOPS[2], params).key
    assert engine.stats().spec.num_draft_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_biased_request_over_http_drafts_and_so_do_others(stream: bool, serve: Serve, ref: Reference) -> None:
    with serve("self").http() as http:
        token_id = favourite(ref, LOOPS[2])
        body: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logit_bias": {str(token_id): -100}}
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={token_id: -100})
        before = metric(http, "vllm:spec_decode_num_accepted_tokens_total")
        answer = complete(http, LOOPS[2], stream=stream, **body)
        assert answer.token_ids == ref(LOOPS[2], params).token_ids
        assert metric(http, "vllm:spec_decode_num_accepted_tokens_total") > before
