"""A real model on a GPU in bfloat16: its texts with drafts are its texts without, but for near ties.

Run where SmolLM2-135M is at hand as `$FORERUN_CACHE/smollm2-135m.gguf`; skipped elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.cli.demo_prompts import DEMO_PROMPTS
from forerun.models.tokenizer import load_tokenizer
from forerun.request import SamplingParams
from tests.gpu.flips import assert_near_ties_only, with_logprobs
from tests.tiny_engine import NGRAM, SUFFIX, Result, Work, make_engine, run

MODEL = Path(os.environ.get("FORERUN_CACHE", "")) / "smollm2-135m.gguf"
NEAR_TIE = 0.5  # of logits around 20, in which bfloat16 tells 0.125 apart, from states that are as coarse
NUM_TOKENS = 128
NUM_PARTS = 8  # each prompt is also cut to so many lengths
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 64,
    "max_model_len": 2048,
}
SPECS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    "suffix": SUFFIX,
    "draft_model": {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3},
}

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no usable GPU"),
    pytest.mark.skipif(not MODEL.is_file(), reason="SmolLM2-135M is not at hand: see the module"),
]


@pytest.fixture(scope="module")
def work() -> Work:
    tokenizer = load_tokenizer(str(MODEL), None)
    prompts = [tokenizer.encode(prompt.text) for prompt in DEMO_PROMPTS]
    cut = [prompt[: len(prompt) * part // NUM_PARTS] for prompt in prompts for part in range(1, NUM_PARTS + 1)]
    return [
        (prompt, SamplingParams(temperature=(place % 2) * 0.8, top_k=10, max_tokens=NUM_TOKENS, ignore_eos=True))
        for place, prompt in enumerate(cut)
    ]


@pytest.fixture(scope="module")
def alone(work: Work) -> Iterator[list[Result]]:
    """Each request by itself, without speculation."""
    yield run(make_engine(MODEL, **SETTINGS), with_logprobs(work), together=False)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", SPECS)
def test_drafts_flip_near_ties_only(name: str, work: Work, alone: list[Result]) -> None:
    """Each request by itself: all that differs is that rows of drafts share its pass."""
    engine = make_engine(MODEL, SPECS[name], **SETTINGS)
    assert_near_ties_only(run(engine, work, together=False), alone, work, NEAR_TIE, f"bfloat16, {name}")


@pytest.mark.parametrize("name", SPECS)
def test_batch_invariance_leaves_no_flips(name: str, work: Work) -> None:
    """All requests together, with drafts, against each by itself without: token for token."""
    by_itself = run(make_engine(MODEL, batch_invariant=True, **SETTINGS), work, together=False)
    together = run(make_engine(MODEL, SPECS[name], batch_invariant=True, **SETTINGS), work)
    assert [result.token_ids for result in together] == [result.token_ids for result in by_itself]
