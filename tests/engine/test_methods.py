"""What every method must hold: the text of the target, all right drafts accepted, nothing left behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.request import SamplingParams
from tests.engine.test_lossless import SETTINGS, assert_same, mixed_work
from tests.methods import METHODS, PERFECT, DraftModels, remembers
from tests.tiny_engine import Result, Work, finish, make_engine, prompts, run


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[Result]:
    """Each request alone, without speculation."""
    return run(make_engine(tiny_model), mixed_work(), together=False)


def assert_idle(engine: Engine) -> None:
    for group in engine.scheduler.pool.groups:
        assert group.num_used == 0, f"idle, yet blocks of {group.spec.name} are held"
        group.drop_kept()
    assert len(engine.scheduler.pool._free_chunks) == engine.scheduler.pool.num_chunks
    if not remembers(engine.info().speculative_config):
        assert engine.proposer.state_bytes < 1024


def with_room_beside(model: Path, spec: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Memory for as many of the target's blocks with a head's rows beside them as without."""
    memory = settings.get("kv_cache_memory_bytes")
    if memory is None:
        return settings
    engine = make_engine(model, spec)
    block_bytes = engine.scheduler.target.spec.block_bytes
    beside = sum(group.block_bytes for group in engine.proposer.groups_beside)  # type: ignore[attr-defined]
    return settings | {"kv_cache_memory_bytes": memory * (block_bytes + beside) // block_bytes}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_text_is_the_targets(
    tiny_model: Path, draft_models: DraftModels, reference: list[Result], method: str, settings: dict[str, Any]
) -> None:
    """Greedy and drawn, in mixed batches, chunks, small memory with preemption; then again from the prefix cache."""
    spec = METHODS[method](draft_models)
    engine = make_engine(tiny_model, spec, **with_room_beside(tiny_model, spec, settings))
    assert_same(run(engine, mixed_work()), reference)
    if "kv_cache_memory_bytes" in settings:
        assert engine.stats().num_preemptions > 0
    assert_same(run(engine, mixed_work()), reference)
    assert engine.stats().spec.num_draft_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize("method", METHODS)
def test_requests_that_come_and_go(
    tiny_model: Path, draft_models: DraftModels, reference: list[Result], method: str
) -> None:
    """Arrivals in mid-flight, aborts, requests that do not draft, and again after a pause."""
    engine = make_engine(tiny_model, METHODS[method](draft_models), max_num_batched_tokens=24, max_num_seqs=5)
    rng = random.Random(7)
    results: dict[str, Result] = {}
    for place, (prompt, params) in enumerate(mixed_work()):
        seed = params.seed if params.seed is not None else place
        results[f"r{place}"] = Result()
        results[f"gone{place}"] = Result()
        off = {"max_draft_tokens": 0} if place % 4 == 3 else {}
        engine.add_request(NewRequest(f"r{place}", list(prompt), params, seed, **off))
        engine.add_request(NewRequest(f"gone{place}", list(prompt[::-1]), params, seed))
        for _ in range(rng.randint(0, 4)):
            for output in engine.step().outputs:
                results[output.request_id].add(output)
        engine.abort_requests([f"gone{place}"])
        engine.scheduler.check_integrity()
    finish(engine, results)
    assert_same([results[f"r{place}"] for place in range(len(reference))], reference)
    for place in range(3, len(reference), 4):
        assert results[f"r{place}"].last.metrics.speculative_decoding["num_draft_tokens"] == 0
    assert_idle(engine)


def long_work(count: int = 6) -> Work:
    """Greedy and drawn; no end token cuts them."""
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1, "top_k": 9},
    ]
    return [
        (prompt, SamplingParams(max_tokens=41, ignore_eos=True, seed=place, **kinds[place % 4]))
        for place, prompt in enumerate(prompts(count, seed=3, shortest=20))
    ]


CHUNKS: dict[str, dict[str, Any]] = {
    "one_chunk": {"max_num_batched_tokens": 512},
    "many_chunks": {"max_num_batched_tokens": 64},
    "small_blocks": {"block_size": 4},
    "no_prefix_cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("settings", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("method", PERFECT)
def test_right_drafts_all_stand(
    tiny_model: Path, draft_models: DraftModels, method: str, settings: dict[str, Any]
) -> None:
    """In every row of the batch: 1 token from the prompt's pass, then 8 steps of 5; from the prefix cache too."""
    engine = make_engine(tiny_model, PERFECT[method](draft_models), **settings)
    for _ in range(2):
        for result in run(engine, long_work()):
            found = result.last.metrics.speculative_decoding
            assert found["acceptance_histogram"] == [0, 0, 0, 0, 8]
            assert (found["num_draft_tokens"], found["num_accepted_draft_tokens"]) == (32, 32)
    if settings.get("enable_prefix_caching", True):
        assert engine.scheduler.prefix_cache_hits > 0
    assert_idle(engine)


@pytest.mark.parametrize("method", METHODS)
def test_acceptance_does_not_depend_on_how_the_prompt_came(
    tiny_model: Path, draft_models: DraftModels, method: str
) -> None:
    """Per step and request: in one chunk, in many, in company, from the prefix cache."""
    if remembers(METHODS[method](draft_models)):
        pytest.skip("drafts come from what others said, too")
    expected: list[Any] = []
    for settings in CHUNKS.values():
        engine = make_engine(tiny_model, METHODS[method](draft_models), **settings)
        for together in (False, True, True):
            results = run(engine, long_work(), together=together)
            steps = [
                (m["per_step_drafted"], m["per_step_accepted"])
                for m in (result.last.metrics.speculative_decoding for result in results)
            ]
            expected = expected or steps
            assert steps == expected
    if method != "pard":  # whose model is random
        assert sum(sum(accepted) for _, accepted in expected) > 0


@pytest.mark.parametrize("method", PERFECT)
def test_full_acceptance_after_a_pause(tiny_model: Path, draft_models: DraftModels, method: str) -> None:
    """Steps without drafts leave the draft's cache behind; it catches up when it is asked again."""
    engine = make_engine(tiny_model, PERFECT[method](draft_models))
    lengths, calls = engine.control.lengths, 0

    def with_pauses(requests: Any) -> dict[str, int]:
        nonlocal calls
        calls += 1
        return lengths(requests) if calls % 7 in (1, 2) else {}

    engine.control.lengths = with_pauses  # type: ignore[method-assign]
    for result in run(engine, long_work()):
        found = result.last.metrics.speculative_decoding
        assert found["num_accepted_draft_tokens"] == found["num_draft_tokens"] > 0
    assert_idle(engine)


def test_memory_is_taken_back_from_drafts_before_a_request_is_preempted(
    tiny_model: Path, draft_models: DraftModels
) -> None:
    """With room for the target's tokens alone, nobody is preempted because somebody drafted."""
    work = [(prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)) for prompt, _ in long_work(4)]
    blocks = sum(-(-(len(prompt) + 61) // 16) for prompt, _ in work)
    settings = {"kv_cache_memory_bytes": (blocks + 1) * 16 * 512, "max_model_len": 200, "max_num_batched_tokens": 512}
    expected = run(make_engine(tiny_model, **settings), work, together=False)
    engine = make_engine(tiny_model, PERFECT["draft_model"](draft_models), **settings)
    most_held, held_at_end = 0, -1
    step = engine.step

    def watched() -> Any:
        nonlocal most_held, held_at_end
        output = step()
        held_at_end = engine.scheduler.pool.groups[1].num_used if len(engine.scheduler.running) == 4 else held_at_end
        most_held = max(most_held, held_at_end)
        return output

    engine.step = watched  # type: ignore[method-assign]
    assert_same(run(engine, work), expected)
    assert engine.stats().num_preemptions == 0
    assert most_held > 0
    assert held_at_end < most_held, "drafts gave room to the requests"
    assert_idle(engine)


def test_nobody_drafts_no_memory(tiny_model: Path, draft_models: DraftModels) -> None:
    engine = make_engine(tiny_model, PERFECT["draft_model"](draft_models))
    work = [(prompt, SamplingParams(temperature=0, max_tokens=9)) for prompt, _ in long_work(3)]
    step = engine.step

    def watched() -> Any:
        output = step()
        assert not engine.scheduler.pool.groups[1].chunks
        return output

    engine.step = watched  # type: ignore[method-assign]
    run(engine, work, max_draft_tokens=0)
    assert engine.stats().spec.num_drafts == 0
