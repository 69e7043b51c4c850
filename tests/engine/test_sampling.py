"""Every sampling parameter with every method, in chunks and with preemption: what it gives without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.request import SamplingParams
from tests.engine.test_lossless import SETTINGS, assert_same
from tests.engine.test_methods import with_room_beside
from tests.methods import METHODS, DraftModels
from tests.tiny_engine import Result, Work, make_engine, prompts, run

FIELDS: list[dict[str, Any]] = [
    {"presence_penalty": 0.8, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.2, "logprobs": 2},
    {"repetition_penalty": 0.7, "presence_penalty": -1.0, "ignore_eos": True},
    {"logit_bias": {45: 6.0, 60: -100.0}, "min_p": 0.05, "logprob_token_ids": (45, 60)},
    {"allowed_token_ids": tuple(range(30, 90)), "min_tokens": 6, "stop_token_ids": tuple(range(30, 50))},
    {"bad_words": ("e", "a", "th", "in"), "min_tokens": 4, "stop": ("o",), "prompt_logprobs": 1},
]


def work() -> Work:
    """Each set of fields greedy and drawn."""
    cases = [SamplingParams(temperature=t, max_tokens=16, seed=3, **fields) for fields in FIELDS for t in (0.0, 1.0)]
    return list(zip(prompts(len(cases), seed=6), cases, strict=True))


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[Result]:
    return run(make_engine(tiny_model), work(), together=False)


@pytest.mark.parametrize("settings", ["small_budget", "few_blocks"])
@pytest.mark.parametrize("method", METHODS)
def test_parameters_give_what_they_give_without_drafts(
    tiny_model: Path, draft_models: DraftModels, reference: list[Result], method: str, settings: str
) -> None:
    spec = METHODS[method](draft_models)
    engine = make_engine(tiny_model, spec, **with_room_beside(tiny_model, spec, SETTINGS[settings]))
    results = run(engine, work())
    assert_same(results, reference)
    for result, expected in zip(results, reference, strict=True):
        assert result.outputs[0].prompt_logprobs == expected.outputs[0].prompt_logprobs
    assert engine.stats().spec.num_draft_tokens > 0
    assert not engine.processors._asked
