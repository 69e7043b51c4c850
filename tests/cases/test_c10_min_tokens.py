"""C10: min_tokens counts tokens, not steps, in a batch where one request has no draft and the other a full one."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.engine.messages import NewRequest
from forerun.request import FinishReason, SamplingParams
from tests.cases.conftest import MakeEngine, Reference, Serve
from tests.cases.material import DISTINCT, LOOPS, complete
from tests.methods import METHODS, DraftModels
from tests.tiny_engine import Result, finish, run

AT_ONCE = DISTINCT[3]


@pytest.fixture
def prompt(ref: Reference) -> list[int]:
    """One that holds REF's answer to it, so that n-grams have something to copy."""
    return LOOPS[2] + ref(LOOPS[2], max_tokens=24, ignore_eos=True).token_ids + LOOPS[2]


@pytest.fixture
def end(ref: Reference, prompt: list[int]) -> int:
    """r1 of REF: it comes again and again."""
    return ref(prompt, max_tokens=24, ignore_eos=True).token_ids[0]


@pytest.mark.parametrize("method", ["self", *METHODS])
def test_no_end_before_min_tokens_and_none_is_lost_after_it(
    method: str, engines: MakeEngine, ref: Reference, prompt: list[int], end: int, draft_models: DraftModels
) -> None:
    spec = None if method == "self" else METHODS[method](draft_models)
    engine = engines("self" if method == "self" else None, 4, spec=spec)
    for min_tokens in (0, 1, 2, 5, 8):
        params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(end,), min_tokens=min_tokens)
        may_end = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=ref(AT_ONCE, max_tokens=1).token_ids)
        results = {"without": Result(), "with": Result()}
        engine.add_request(NewRequest("without", AT_ONCE, may_end, 0, max_draft_tokens=0))
        engine.add_request(NewRequest("with", prompt, params, 0))
        finish(engine, results)
        assert results["with"].key == ref(prompt, params).key
        assert end not in results["with"].token_ids[:min_tokens]
        assert len(results["without"].token_ids) == 1
        assert results["without"].last.finish_reason is FinishReason.STOP
    assert engine.stats().spec.num_draft_tokens > 0


def test_an_end_may_stand_right_after_them(engines: MakeEngine, ref: Reference) -> None:
    """The first position that may end the text does, where the target wants to: with a bias it always wants to."""
    for min_tokens in (0, 1, 2, 5, 8):
        params = SamplingParams(
            temperature=0, max_tokens=24, stop_token_ids=(9,), min_tokens=min_tokens, logit_bias={9: 100}
        )
        (result,) = run(engines("self", 4), [(LOOPS[2], params)])
        assert result.key == ref(LOOPS[2], params).key
        assert len(result.token_ids) == min_tokens + 1
        assert result.last.stop_reason == 9


@pytest.mark.parametrize("min_tokens", [0, 3, 4, 5, 24])
def test_a_stop_string_that_ends_earlier_does_not_count(min_tokens: int, engines: MakeEngine, ref: Reference) -> None:
    """The text goes over it, and ends at the next one that a later token completes."""
    plain = ref(LOOPS[2], max_tokens=24, ignore_eos=True)
    stop = plain.outputs[3].text or plain.text[3]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,), min_tokens=min_tokens)
    (result,) = run(engines("self", 8), [(LOOPS[2], params)])
    assert result.key == ref(LOOPS[2], params).key
    assert result.token_ids == plain.token_ids[: len(result.token_ids)]
    assert len(result.token_ids) > min_tokens or result.last.finish_reason is FinishReason.LENGTH
    if min_tokens == 24:
        assert result.text == plain.text


@pytest.mark.parametrize("name", ["ngram", "self"])
def test_min_tokens_over_http(name: str, serve: Serve, ref: Reference, prompt: list[int], end: int) -> None:
    with serve(name).http() as http:
        body: dict[str, Any] = {"max_tokens": 24, "stop_token_ids": [end], "min_tokens": 5}
        params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(end,), min_tokens=5)
        for stream in (False, True):
            assert complete(http, prompt, stream=stream, **body).token_ids == ref(prompt, params).token_ids
