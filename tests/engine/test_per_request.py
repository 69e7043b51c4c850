"""Requests that draft more, less, or not at all, in one batch: `speculative_config` of each, honoured and harmless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.engine.messages import NewRequest
from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.request import SamplingParams
from tests.cases.material import LOOPS
from tests.tiny_engine import NGRAM, SUFFIX, Result, finish, make_engine

WISHES: list[dict[str, Any] | None] = [
    None,
    {},
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 1},
    {"num_speculative_tokens": 5},
    {"method": "none"},
    {"method": "ngram"},
    {"method": ["ngram"], "num_speculative_tokens": 2},
]


def params(wish: dict[str, Any] | None, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True, speculative_config=wish)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), speculative_config=NGRAM, kv_cache_memory_bytes=8 << 20)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20)


def drafted(output: Any) -> list[int]:
    return list(output.metrics.speculative_decoding["per_step_drafted"])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_request_of_a_batch_drafts_as_it_asks_and_says_the_same(llm: LLM, plain: LLM, temperature: float) -> None:
    for prompt in LOOPS[:3]:
        work = [params(wish, temperature) for wish in WISHES]
        outputs = llm.generate([prompt] * len(work), work)
        (expected,) = plain.generate([prompt], params(None, temperature))
        assert all(output.outputs[0].token_ids == expected.outputs[0].token_ids for output in outputs)
        longest = [max(drafted(output), default=0) for output in outputs]
        assert longest[2] == longest[5] == 0
        assert longest[3] <= 1
        assert longest[7] <= 2
        if temperature == 0.0:
            assert longest == [5, 5, 0, 1, 5, 0, 5, 2]


def test_a_call_without_speculation_overrules_what_its_requests_ask_for(llm: LLM) -> None:
    (output,) = llm.generate([LOOPS[2]], params({"num_speculative_tokens": 5}), speculation=False)
    assert drafted(output) == []


@pytest.mark.parametrize(
    ("wish", "part"),
    [
        ({"num_speculative_tokens": 6}, "0 to 5"),
        ({"method": "suffix"}, 'loaded: "ngram"'),
        ({"metod": "ngram"}, 'did you mean "method"?'),
    ],
)
def test_a_bad_wish_is_refused_and_nothing_is_generated(llm: LLM, wish: dict[str, Any], part: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([LOOPS[2]] * 2, [params(None), params(wish)])
    assert part in str(caught.value)
    assert not llm.engine.has_work


def test_without_speculation_only_off_is_taken(plain: LLM) -> None:
    plain.generate([LOOPS[2]], params({"method": "none"}))
    with pytest.raises(RequestError, match="runs without speculation"):
        plain.generate([LOOPS[2]], params({"num_speculative_tokens": 1}))


def test_the_methods_of_a_request_reach_it(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, SUFFIX)
    engine.add_request(NewRequest("r", list(LOOPS[2]), params(None), 3, draft_methods=("suffix",)))
    assert engine.scheduler.waiting[0].draft_methods == ("suffix",)
    assert engine.info().spec_methods == ("suffix",)
    finish(engine, {"r": Result()})
