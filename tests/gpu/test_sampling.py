"""Parameters, forms and rules on a GPU in float32: the CPU's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.request import SamplingParams
from tests.methods import DraftModels
from tests.tiny_engine import NGRAM, SUFFIX, make_engine, prompts, run

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no usable GPU")

FIELDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"min_p": 0.1},
    {"top_k": 5, "top_p": 0.9},
    {"logit_bias": {5: 3.0, 7: -100.0}},
    {"allowed_token_ids": tuple(range(20, 60))},
    {"bad_words": ("e", "the")},
    {"min_tokens": 8, "stop_token_ids": tuple(range(3, 120))},
    {"structured_outputs": {"regex": "[ab]{4}(cd){6}"}},
    {"logprobs": 3},
    {"prompt_logprobs": 1},
]
WORK = [
    (prompt, SamplingParams(**{"max_tokens": 20, "temperature": temperature, "ignore_eos": True} | fields))
    for temperature in (0, 1.0)
    for prompt, fields in zip(prompts(len(FIELDS)), FIELDS, strict=True)
]


@pytest.mark.parametrize("spec", [None, NGRAM, {"method": ["grammar", SUFFIX]}, "draft_model"], ids=str)
def test_every_parameter_gives_the_cpus_tokens(spec: Any, tiny_model: Path, draft_models: DraftModels) -> None:
    expected = run(make_engine(tiny_model, dtype="float32"), WORK, together=False)
    if spec == "draft_model":
        spec = {"method": "draft_model", "model": str(draft_models.noisy), "num_speculative_tokens": 4}
    engine = make_engine(tiny_model, spec, device="cuda", dtype="float32")
    for (_, params), one, other in zip(WORK, run(engine, WORK), expected, strict=True):
        assert one.key == other.key, params


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drafts_that_are_drawn_are_judged_as_on_the_cpu(rule: str, tiny_model: Path, draft_models: DraftModels) -> None:
    spec = {
        "method": "draft_model",
        "model": str(draft_models.noisy),
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": rule,
    }
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    work = [(prompt, params) for prompt in prompts(6)]
    on_cpu, on_gpu = (
        run(make_engine(tiny_model, spec, device=device, dtype="float32"), work) for device in ("cpu", "cuda")
    )
    assert [r.key for r in on_gpu] == [r.key for r in on_cpu]
