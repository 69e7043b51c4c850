"""Sampling parameters in any combination: the same answers with drafts, whoever makes them, however long they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.check.equality import first_difference
from forerun.llm import LLM
from forerun.request import Request, SamplingParams
from tests.methods import METHODS, PERFECT, DraftModels
from tests.tiny_engine import prompts
from tests.tiny_tokenizer import VOCAB_SIZE

BATCH = 16
# The first example is the simplest one, in all places of the batch.
MANY = settings(max_examples=5, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
DRAFTERS = METHODS | {"perfect": PERFECT["draft_model"]}
TOKENS = st.integers(0, VOCAB_SIZE - 1)
WORDS = ["e", "a", "th", " the", "ser", "0", "er", "guess"]


def some(strategy: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=1, max_size=most, unique=True)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from([1, 2, 5, 40]),
    "top_p": st.sampled_from([0.2, 0.7, 0.95]),
    "min_p": st.sampled_from([0.02, 0.2, 1.0]),
    "presence_penalty": st.sampled_from([-1.0, 0.4, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, 0.3, 2.0]),
    "repetition_penalty": st.sampled_from([0.8, 1.1, 2.0]),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -3.0, 2.0, 8.0]), min_size=1, max_size=5),
    "allowed_token_ids": some(TOKENS, 80),
    "bad_words": some(st.sampled_from(WORDS), 3),
    "min_tokens": st.integers(1, 12),
    "max_tokens": st.integers(1, 24),
    "stop": some(st.sampled_from([*WORDS, "\n"]), 2),
    "stop_token_ids": some(TOKENS, 20),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.integers(0, 5),
    "logprob_token_ids": some(TOKENS, 4),
    "prompt_logprobs": st.integers(0, 3),
    "truncate_prompt_tokens": st.integers(2, 30),
    "n": st.integers(1, 3),
    "best_of": st.integers(1, 3),
}


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Two to seven fields at once, beside temperature, seed and a bound on the answer."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=2, max_size=7, unique=True))
    fields = {"max_tokens": 20, "ignore_eos": True} | {name: draw(FIELDS[name]) for name in names}
    if "best_of" in fields:
        fields["n"] = min(fields.get("n", 1), fields["best_of"])
    fields["max_tokens"] = max(fields["max_tokens"], fields.get("min_tokens", 0))
    temperature = draw(st.sampled_from([0.0, 0.0, 0.4, 0.8, 1.0, 1.6]))
    return SamplingParams(temperature=temperature, seed=draw(st.integers(0, 2**63)), **fields)


class Restless:
    """A control whose K is another for each request and step."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.rng = random.Random(0)

    def lengths(self, requests: Sequence[Request]) -> dict[str, int]:
        return {r.request_id: min(self.rng.randint(0, self.most), _bound(r)) for r in requests}


def _bound(request: Request) -> int:
    return 1 << 30 if request.max_draft_tokens is None else request.max_draft_tokens


Load = Callable[[dict[str, Any] | None], LLM]


@pytest.fixture(scope="module")
def load(tiny_model: Path) -> Load:
    def load(spec: dict[str, Any] | None) -> LLM:
        llm = LLM(
            str(tiny_model),
            speculative_config=spec,
            device="cpu",
            kv_cache_memory_bytes=8 << 20,
            max_num_batched_tokens=128,
        )
        llm.engine.control = Restless(llm.info.num_spec_tokens)
        return llm

    return load


@pytest.fixture(scope="module")
def plain(load: Load) -> LLM:
    return load(None)


def assert_same_answers(plain: LLM, drafting: LLM, batch: Sequence[SamplingParams], seed: int) -> None:
    texts = prompts(len(batch), seed=seed, longest=40)
    answers = zip(plain.generate(texts, batch), drafting.generate(texts, batch), batch, strict=True)
    for expected, found, params in answers:
        assert expected.prompt_logprobs == found.prompt_logprobs, params
        for one, other in zip(expected.outputs, found.outputs, strict=True):
            assert first_difference(one, other) is None, (params, one, other)
            assert one.error == other.error


def same_answers(plain: LLM, drafting: LLM) -> None:
    drafted = drafting.stats.spec.num_draft_tokens

    @MANY
    @given(batch=st.lists(parameters(), min_size=BATCH, max_size=BATCH), seed=st.integers(0, 1000))
    def compare(batch: list[SamplingParams], seed: int) -> None:
        assert_same_answers(plain, drafting, batch, seed)

    compare()
    assert drafting.stats.spec.num_draft_tokens > drafted


@pytest.mark.parametrize("method", DRAFTERS)
def test_a_thousand_parameters_give_the_same_answers(
    plain: LLM, load: Load, draft_models: DraftModels, method: str
) -> None:
    """1,216 combinations."""
    same_answers(plain, load(DRAFTERS[method](draft_models)))
