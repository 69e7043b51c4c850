"""C11: the seed of a request decides its text; traffic, drafts and what the engine did before do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.request import SamplingParams
from tests.cases.conftest import SPECS, MakeEngine, Reference, Serve
from tests.cases.material import COMPLETIONS, DISTINCT, LOOPS, Answer, complete
from tests.tiny_engine import run

PROMPT = LOOPS[3]
MOST = 15  # of 20 texts that must differ
METHODS = ["ngram", "self"]


def sampled(seed: int | None, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": seed, "max_tokens": 20, "ignore_eos": True} | fields))


@pytest.mark.parametrize(("method", "k"), [("ngram", 1), ("ngram", 5), ("suffix", 8), ("self", 4)])
def test_one_seed_gives_one_text_whatever_the_engine_did_before(
    method: str, k: int, engines: MakeEngine, ref: Reference
) -> None:
    """C11 a and b in the engine: other traffic before and beside, and every k; each text is REF's."""
    engine = engines(method, k)
    expected = ref(PROMPT, sampled(42))
    for round_ in range(5):
        traffic = [(LOOPS[round_], sampled(round_, max_tokens=3 + round_)), (DISTINCT[round_], sampled(round_))]
        results = run(engine, [*traffic[: round_ % 3], (PROMPT, sampled(42)), *traffic[round_ % 3 :]])
        assert results[min(round_ % 3, 2)].key == expected.key
    texts = run(engine, [(PROMPT, sampled(seed)) for seed in range(1, 21)])
    assert [r.key for r in texts] == [ref(PROMPT, sampled(seed)).key for seed in range(1, 21)]
    assert len({tuple(r.token_ids) for r in texts}) >= MOST
    assert engine.stats().spec.num_draft_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_no_token_appears_that_the_target_gives_no_mass(method: str, engines: MakeEngine, ref: Reference) -> None:
    """C11: also under top_k and top_p, where "no mass" means filtered out: never "!!!!!" (id 3 of the vocabulary)."""
    engine = engines(method)
    for fields in ({}, {"top_k": 3}, {"top_p": 0.5}):
        work = [(PROMPT, sampled(seed, logprobs=5, **fields)) for seed in range(5)]
        for (_, params), result in zip(work, run(engine, work), strict=True):
            assert result.key == ref(PROMPT, params).key
            assert all(math.exp(e.logprob) > 1e-6 for e in result.logprobs)
            assert "top_k" not in fields or all(e.rank <= 3 for e in result.logprobs)


@pytest.fixture(params=[None, "ngram"])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[LLM]:
    spec = SPECS.get(request.param)
    llm = LLM(str(tiny_model), speculative_config=spec, kv_cache_memory_bytes=4 << 20)
    yield llm
    assert llm.stats.num_blocks_used == 0


def test_seeded_and_unseeded_requests_in_one_batch_of_the_offline_front(llm: LLM, ref: Reference) -> None:
    """C11 c and d through LLM: requests without a seed differ, and the seed that was drawn brings the text again."""
    free = [llm.generate(PROMPT, sampled(None))[0] for _ in range(20)]
    assert len({tuple(r.outputs[0].token_ids) for r in free}) >= MOST
    again = llm.generate([PROMPT] * 20, [sampled(r.seed) for r in free])
    assert [r.outputs[0].token_ids for r in again] == [r.outputs[0].token_ids for r in free]
    batch = [r.outputs[0].token_ids for r in llm.generate([PROMPT] * 4, [sampled(s) for s in (7, None, 7, 8)])]
    assert batch[0] == batch[2] == ref(PROMPT, sampled(7)).token_ids
    assert batch[3] == ref(PROMPT, sampled(8)).token_ids
    assert batch[1] not in (batch[0], batch[3])


def ask(http: httpx.Client, seed: int | None, prompt: list[int] = PROMPT, **fields: Any) -> Answer:
    return complete(http, prompt, temperature=1.0, max_tokens=20, ignore_eos=True, seed=seed, **fields)


@pytest.mark.parametrize("method", METHODS)
def test_seeds_over_http(method: str, serve: Serve, ref: Reference) -> None:
    """C11 over HTTP: (a) with other traffic in between, (b), (c), and (d) as four requests at once."""
    with serve(method).http() as http, ThreadPoolExecutor(6) as pool:
        expected = ref(PROMPT, sampled(42)).token_ids
        for round_ in range(5):
            traffic = [pool.submit(ask, http, s, DISTINCT[round_]) for s in (None, round_)]
            assert ask(http, 42).token_ids == expected
            assert ask(http, 42, stream=True).token_ids == expected
            assert all(len(t.result().token_ids) == 20 for t in traffic)
        seeded = list(pool.map(lambda seed: tuple(ask(http, seed).token_ids), range(1, 21)))
        assert [list(ids) for ids in seeded] == [ref(PROMPT, sampled(seed)).token_ids for seed in range(1, 21)]
        assert len(set(seeded)) >= MOST
        assert len({tuple(ask(http, None).token_ids) for _ in range(20)}) >= MOST
        batch = [a.token_ids for a in pool.map(lambda seed: ask(http, seed), (7, None, 7, 8))]
        assert batch[0] == batch[2] == ref(PROMPT, sampled(7)).token_ids
        assert batch[3] == ref(PROMPT, sampled(8)).token_ids
        assert batch[1] not in (batch[0], batch[3])


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_that_was_drawn_is_returned_and_brings_the_text_again(method: str, serve: Serve) -> None:
    """C11 over HTTP: nothing that is random is lost."""
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 20}
    with serve(method).http() as http:
        (drawn,) = http.post(COMPLETIONS, json=body).json()["choices"]
        (again,) = http.post(COMPLETIONS, json=body | {"seed": drawn["seed"]}).json()["choices"]
        assert again == drawn
