"""The first promise, in every family: windows, caps, experts and all, drafts and company do not change the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.kernels import native
from forerun.request import SamplingParams
from tests.models.tiny import FAMILIES
from tests.tiny_engine import NGRAM, SUFFIX, Result, make_engine, prompts, run, save_tiny_target

PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=25, logprobs=2, ignore_eos=True),
]
WORK = [(prompt, PARAMS[place % len(PARAMS)]) for place, prompt in enumerate(prompts(8))]  # past all windows
TIGHT = {"max_num_batched_tokens": 12, "max_num_seqs": 3, "max_model_len": 120}
TIGHT_BYTES = 160 << 10  # of keys and values in float32


def keys(results: list[Result]) -> list[Any]:
    return [(result.key, [(e.token_id, e.logprob) for e in result.logprobs]) for result in results]


@pytest.mark.parametrize("quantization", ["int8", None] if native.available() else [None])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_does_not_depend_on_drafts_or_company(family: str, quantization: str | None, tmp_path: Path) -> None:
    model = save_tiny_target(tmp_path, family=family, num_hidden_layers=3)
    expected = keys(run(make_engine(model, quantization=quantization), WORK, together=False))
    assert len({tuple(key[0]) for key, _ in expected}) == len(WORK)
    preemptions = 0
    tight = TIGHT | {
        "kv_cache_memory_bytes": TIGHT_BYTES // (2 if quantization else 1)
    }  # bfloat16 beside packed weights
    for spec, settings in [(NGRAM, {}), (SUFFIX, tight)]:
        engine = make_engine(model, spec, quantization=quantization, **settings)
        assert keys(run(engine, WORK)) == expected
        assert engine.stats().spec.num_draft_tokens > 0
        preemptions += engine.stats().num_preemptions
    assert preemptions > 0
