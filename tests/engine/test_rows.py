"""A row's logits have the same bits alone and in a batch, at any draft length, in chunks or not, after a prefix hit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.engine.engine import Engine
from forerun.engine.plan import ForwardResult, Plan
from forerun.request import Request, SamplingParams
from forerun.testing import ScriptedProposer
from tests.tiny_engine import chain, make_engine, oracle, prompts, run
from tests.tiny_tokenizer import VOCAB_SIZE

WORK = [(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for prompt in prompts(6, seed=4)]


def record_rows(engine: Engine) -> dict[tuple[int, int], list[Tensor]]:
    """Every root row's logits, by (prompt length, output position), as the engine runs."""
    rows: dict[tuple[int, int], list[Tensor]] = {}
    forward = engine.runner.forward

    def recording(plan: Plan) -> ForwardResult:
        result = forward(plan)
        for sampling, s in zip(plan.sampling, [s for s in plan.scheduled if s.samples], strict=True):
            for node in range(sampling.num_rows):  # rows along the accepted beginning of the draft belong to the text
                key = (s.request.num_prompt_tokens, sampling.position + node)
                rows.setdefault(key, []).append(result.logits[sampling.first_row + node].clone())
                if node < len(s.draft) and s.draft.tokens[node] != int(
                    result.logits[sampling.first_row + node].argmax()
                ):
                    break
        return result

    engine.runner.forward = recording  # type: ignore[method-assign]
    return rows


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(
    tiny_model: Path, kv_cache_dtype: str
) -> tuple[dict[tuple[int, int], list[Tensor]], dict[tuple[int, ...], list[int]]]:
    engine = make_engine(tiny_model, enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype)
    rows = record_rows(engine)
    results = run(engine, WORK, together=False)
    assert len({len(prompt) for prompt, _ in WORK}) == len(WORK), "prompt lengths tell the requests apart"
    return rows, {tuple(prompt): r.token_ids for (prompt, _), r in zip(WORK, results, strict=True)}


@pytest.mark.parametrize(("length", "num_threads"), [(0, 1), (1, 1), (3, 1), (7, 1), (12, 1), (3, 2)])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 13, "max_num_seqs": 3}, {"block_size": 8}],
    ids=["wide", "chunks", "blocks"],
)
def test_bits_of_a_row(
    alone: Any, tiny_model: Path, kv_cache_dtype: str, length: int, settings: dict[str, Any], num_threads: int
) -> None:
    expected, texts = alone
    continuation = oracle(texts)
    rng = random.Random(length)

    def script(request: Request, num_tokens: int) -> Any:
        tokens = continuation(request, num_tokens)
        wrong = rng.randint(0, num_tokens)
        return chain([t if i < wrong else rng.randrange(VOCAB_SIZE) for i, t in enumerate(tokens)])

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        settings = {"kv_cache_dtype": kv_cache_dtype} | settings
        engine = make_engine(tiny_model, ScriptedProposer(script), length=length, **settings)
        rows = record_rows(engine)
        for _ in range(2):  # the second time prompts come from the prefix cache
            run(engine, WORK)
        assert engine.scheduler.prefix_cache_hits > 0
    finally:
        torch.set_num_threads(before)
    assert rows.keys() == expected.keys()
    for key, copies in rows.items():
        assert len(copies) >= 2
        for row in copies:
            assert torch.equal(row, expected[key][0]), f"other bits at {key}"
