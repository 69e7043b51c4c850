"""Log-probabilities of the prompt: exact whatever the chunks, the cache and the drafts are; against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun import LLM
from forerun.request import SamplingParams
from forerun.spec.verifier import TokenLogprobs
from tests.tiny_engine import NGRAM, Result, make_engine, prompts, run

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=3)
PROMPTS = [*prompts(5, seed=2), [7], [7, 9]]
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 7},
    "preemption": {"kv_cache_memory_bytes": 512 * 16 * 10, "max_model_len": 100, "max_num_batched_tokens": 20},
}


def entries(result: Result) -> list[TokenLogprobs]:
    given = [output.prompt_logprobs for output in result.outputs]
    assert all(part is None for part in given[1:]), "they come with the first output"
    return given[0] or []


@pytest.mark.parametrize("spec", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_they_are_transformers_and_do_not_depend_on_chunks_cache_or_drafts(
    tiny_model: Path, settings: dict[str, Any], spec: dict[str, Any] | None
) -> None:
    hf = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    engine = make_engine(tiny_model, spec, **settings)
    first = run(engine, [(prompt, PARAMS) for prompt in PROMPTS])
    again = run(engine, [(prompt, PARAMS) for prompt in PROMPTS])  # the cache holds them now
    if "kv_cache_memory_bytes" in settings:
        assert engine.stats().num_preemptions > 0
    for prompt, result, other in zip(PROMPTS, first, again, strict=True):
        assert entries(result) == entries(other)
        assert [entry.token_id for entry in entries(result)] == prompt[1:]
        assert other.last.num_cached_tokens == 0
        with torch.inference_mode():
            expected = hf(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for entry, row in zip(entries(result), expected, strict=False):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            values, ids = row.topk(3)
            assert [i for i, _ in entry.top] == ids.tolist()
            assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())


def test_only_who_asks_goes_without_the_cache(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    prompt = PROMPTS[0] * 2
    plain = SamplingParams(temperature=0, max_tokens=2)
    for params, cached in ((plain, False), (PARAMS, False), (plain, True)):
        (result,) = run(engine, [(prompt, params)])
        assert bool(result.last.num_cached_tokens) == cached


def test_the_offline_front_gives_one_entry_a_token(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), kv_cache_memory_bytes=1 << 20)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2, prompt_logprobs=0, n=2, seed=1))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:] if entry is not None] == PROMPTS[0][1:]
    (alone,) = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert alone.prompt_logprobs in ([None], None)
