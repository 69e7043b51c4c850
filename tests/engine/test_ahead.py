"""Steps that are launched before the one before them is read say what steps one by one say: the same text, and where a
draft head drafts, the same drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.attention.slots import BlockTables
from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.engine.slots import Slots
from forerun.request import Request, SamplingParams
from forerun.spec.control import FixedLength
from forerun.spec.proposer import UNKNOWN, RequestDraft
from forerun.spec.proposers.recorded_drafts import Recorded
from forerun.testing import ScriptedProposer
from tests.engine.test_lossless import SETTINGS, assert_same, mixed_work
from tests.engine.test_methods import assert_idle, long_work, with_room_beside
from tests.methods import METHODS, DraftModels, K
from tests.tiny_engine import Result, Work, finish, make_engine, prompts, run

HEADS = ["eagle3", "eagle"]
DRAFTING = [*HEADS, "draft_model"]
SERVED = [None, *DRAFTING]  # None: plain decoding
Make = Callable[..., Engine]
Drafts = dict[tuple[str, int], list[int]]  # by request and position of the last known token


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[Result]:
    """Each request alone, step by step, without speculation."""
    return run(make_engine(tiny_model), mixed_work(), together=False)


@pytest.fixture
def make(tiny_model: Path, draft_models: DraftModels) -> Make:
    def made(method: str | None, *, ahead: bool = True, keys: dict[str, Any] | None = None, **settings: Any) -> Engine:
        spec = None if method is None else METHODS[method](draft_models) | (keys or {})
        settings = settings if spec is None else with_room_beside(tiny_model, spec, settings)
        engine = make_engine(tiny_model, spec, async_scheduling=ahead, **settings)
        assert (engine.device_step is not None) == ahead
        return engine

    return made


def launched_ahead(engine: Engine) -> list[bool]:
    """Of each step from now on, whether the one before was not read yet."""
    seen: list[bool] = []
    run_plan = engine._run

    def watched(plan: Any, ahead: bool) -> Any:
        seen.append(ahead and engine._flight is not None)
        return run_plan(plan, ahead)

    engine._run = watched  # type: ignore[method-assign]
    return seen


def recorded(engine: Engine) -> Drafts:
    """What is drafted from now on, on the host or on the device."""
    found: Drafts = {}
    propose, draft_slots = engine.proposer.propose, engine.proposer.draft_slots

    def on_host(inputs: Any, grant: Any) -> Any:
        draft = propose(inputs, grant)
        for request in grant.requests:
            found[request.request_id, request.num_tokens - 1] = draft.of(request.request_id).tokens
        return draft

    def on_device(slots: Any, grant: Any) -> Any:
        draft = draft_slots(slots, grant)
        for request in grant.requests:
            tokens = draft.of(request.request_id).tokens
            assert set(tokens) <= {UNKNOWN}
            drafted = slots.tables.drafted[request.slot].tolist()
            found[request.request_id, int(slots.tables.positions[request.slot])] = drafted[: len(tokens)]
        return draft

    engine.proposer.propose = on_host  # type: ignore[method-assign]
    engine.proposer.draft_slots = on_device  # type: ignore[method-assign]
    return found


def assert_same_drafts(found: Drafts, expected: Drafts) -> None:
    """Where both drafted, as far as both went: near its end a request in flight may be granted less."""
    common = found.keys() & expected.keys()
    assert len(common) > 0.7 * len(expected) > 0
    for key in common:
        length = min(len(found[key]), len(expected[key]))
        assert found[key][:length] == expected[key][:length], key
    assert sum(found[key] == expected[key] for key in common) > 0.7 * len(common)
    assert any(len(found[key]) == K for key in common)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("method", SERVED)
def test_text_is_the_targets(make: Make, reference: list[Result], method: str | None, settings: dict[str, Any]) -> None:
    """Greedy and drawn, in chunks, small memory with preemption, with requests among them (log-probabilities) that the
    host has to see; then again from the prefix cache."""
    engine = make(method, **settings)
    seen = launched_ahead(engine)
    for _ in range(2):
        assert_same(run(engine, mixed_work()), reference)
    if method == "draft_model" and "kv_cache_memory_bytes" in settings:
        # whoever the host has to see waits until the others are at their last tokens; the test below runs ahead there
        assert False in seen
    else:
        assert set(seen) == {True, False}
    if "kv_cache_memory_bytes" in settings:
        assert engine.stats().num_preemptions > 0
    elif settings.get("enable_prefix_caching", True):
        assert engine.scheduler.prefix_cache_hits > 0
    assert method is None or engine.stats().spec.num_accepted_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize("settings", ["small_budget", "few_blocks", "blocks_of_4"])
@pytest.mark.parametrize("method", DRAFTING)
def test_drafts_are_those_of_steps_one_by_one(make: Make, method: str, settings: str) -> None:
    """Token by token, in every batch, chunk and block, after preemption, and from the prefix cache."""
    ahead, step_by_step = make(method, **SETTINGS[settings]), make(method, ahead=False, **SETTINGS[settings])
    found, expected = recorded(ahead), recorded(step_by_step)
    seen = launched_ahead(ahead)
    for _ in range(2):
        assert_same(run(ahead, long_work()), run(step_by_step, long_work()))
        assert_same_drafts(found, expected)
    assert any(seen)
    assert_idle(ahead)


def test_a_request_that_comes_back_to_its_slot_is_told_anew() -> None:
    """After it was preempted, and went on in another slot or step by step meanwhile."""
    slots = Slots([BlockTables.new(2, 8, torch.device("cpu"))], 16, K)
    request = Request("r", [5, 6, 7], 2, SamplingParams(), 0)
    for slot in (0, 1, 0, 0):
        request.slot = slot
        slots.update([request])
        assert int(slots.tables.positions[slot]) == request.num_tokens - 1
        assert slots.tables.last[slot].tolist() == request.token_ids[-2:]
        request.token_ids.append(8 + request.num_preemptions)
        request.num_preemptions += 1


@pytest.mark.parametrize("method", HEADS)
def test_padding_changes_no_draft(make: Make, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs have it: more slots, and more passes, than a step needs."""
    ahead, step_by_step = make(method), make(method, ahead=False)
    (member,) = ahead.proposer.members  # type: ignore[attr-defined]
    head = member.proposer._on_slots
    replays: list[int] = []
    padded = ahead.device_step.slots.batch([], [], 9, 1)

    def replay() -> None:
        replays.append(padded.num_slots)
        head._draft_rows(padded, K)

    recording = Recorded(K, padded, SimpleNamespace(replay=replay))
    monkeypatch.setattr(head._recorded, "_recorded", [recording])
    found, expected = recorded(ahead), recorded(step_by_step)
    assert_same(run(ahead, long_work()), run(step_by_step, long_work()))
    assert_same_drafts(found, expected)
    assert set(replays) == {9}


@pytest.mark.parametrize("method", DRAFTING)
def test_drafts_stay_right_where_host_and_device_take_turns(make: Make, method: str) -> None:
    """A request that only the host can serve comes and goes while others draft."""
    ahead, step_by_step = make(method, max_num_batched_tokens=40), make(method, ahead=False)
    found, expected = recorded(ahead), recorded(step_by_step)
    seen = launched_ahead(ahead)
    work = [(prompt, SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)) for prompt in prompts(4, seed=5)]
    seeing = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    for engine in (ahead, step_by_step):
        results = {f"r{place}": Result() for place in range(len(work))} | {f"x{turn}": Result() for turn in range(3)}
        for place, (prompt, params) in enumerate(work):
            engine.add_request(NewRequest(f"r{place}", list(prompt), params, place))
        for turn in range(3):
            for _ in range(9):
                for output in engine.step().outputs:
                    results[output.request_id].add(output)
            engine.add_request(NewRequest(f"x{turn}", prompts(1, seed=turn)[0], seeing, 0))
        finish(engine, results)
        texts = [results[f"r{place}"].key for place in range(len(work))]
        if engine is ahead:
            first = texts
    assert texts == first
    assert_same_drafts(found, expected)
    assert sum(before != after for before, after in itertools.pairwise(seen)) >= 5
    assert_idle(ahead)


@pytest.mark.parametrize("method", DRAFTING)
def test_as_much_is_accepted_at_every_step(make: Make, method: str) -> None:
    """Of requests one at a time, drafted and accepted, until max_tokens comes into reach of what may be in flight."""
    length = 60
    work = [(prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)) for prompt, _ in long_work(3)]
    ends: list[list[tuple[int, int]]] = []
    for ahead in (True, False):
        for result in run(make(method, ahead=ahead), work, together=False):
            metrics = result.last.metrics.speculative_decoding
            ends.append(list(zip(metrics["per_step_drafted"], metrics["per_step_accepted"], strict=True)))
    accepted = 0
    for found, expected in zip(ends[: len(work)], ends[len(work) :], strict=True):
        sure, known = 0, 1
        while known + 2 * (K + 1) < length:
            known += 1 + expected[sure][1]
            accepted += expected[sure][1]
            sure += 1
        assert found[:sure] == expected[:sure]
        assert sure > 5
    assert accepted > 0


@pytest.mark.parametrize("method", SERVED)
def test_requests_that_come_and_go(make: Make, reference: list[Result], method: str | None) -> None:
    """Arrivals in mid-flight, aborts with a step in flight, slots that pass on, requests that do not draft."""
    engine = make(method, max_num_batched_tokens=24, max_num_seqs=5)
    rng = random.Random(7)
    results: dict[str, Result] = {}
    for place, (prompt, params) in enumerate(mixed_work()):
        seed = params.seed if params.seed is not None else place
        results[f"r{place}"], results["gone"] = Result(), Result()
        off = {"max_draft_tokens": 0} if place % 4 == 3 else {}
        engine.add_request(NewRequest(f"r{place}", list(prompt), params, seed, **off))
        engine.add_request(NewRequest("gone", list(prompt[::-1]), params, seed))
        for _ in range(rng.randint(0, 6)):
            for output in engine.step().outputs:
                results[output.request_id].add(output)
        engine.abort_requests(["gone"])
        engine.scheduler.check_integrity()
    finish(engine, results)
    assert_same([results[f"r{place}"] for place in range(len(reference))], reference)
    for place in range(3, len(reference), 4):
        if method is not None:
            assert results[f"r{place}"].last.metrics.speculative_decoding["num_draft_tokens"] == 0
    assert_idle(engine)


@pytest.mark.parametrize("method", SERVED)
def test_a_text_ends_where_it_must(make: Make, method: str | None) -> None:
    """At a token, a string or a count, wherever in a draft it comes: what was launched beyond is of no account."""
    starts = prompts(6, seed=11, longest=30)
    engine = make(method, ahead=False)
    whole = run(engine, [(p, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) for p in starts])
    work: Work = []
    for place, (prompt, result) in enumerate(zip(starts, whole, strict=True)):
        for end in range(1 + place, 36, 5):
            ends: list[dict[str, Any]] = [{"stop_token_ids": (result.token_ids[end],)}, {"max_tokens": end}]
            if len(result.outputs) > end and (text := result.outputs[end].text.strip()):
                ends.append({"stop": (text,)})
            params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
            work = [*work, (prompt, SamplingParams(**params | ends[end % len(ends)]))]  # type: ignore[arg-type]
    expected = run(engine, work)
    assert len({result.last.finish_reason for result in expected}) == 2
    ahead = make(method)
    assert_same(run(ahead, work), expected)
    assert_idle(ahead)


@pytest.mark.parametrize("method", SERVED)
def test_requests_reach_the_models_length(make: Make, method: str | None) -> None:
    work = [(prompt, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)) for prompt in prompts(3, seed=9)]
    settings = {"max_model_len": 70, "block_size": 4}
    results = run(make(method, **settings), work)
    assert_same(results, run(make(method, ahead=False, **settings), work))
    assert [len(prompt) + len(result.token_ids) for (prompt, _), result in zip(work, results, strict=True)] == [70] * 3


@pytest.mark.parametrize("method", DRAFTING)
def test_lengths_by_batch_size_and_request(make: Make, method: str, reference: list[Result]) -> None:
    """K of each step, and what a request asks for, hold for what the device drafts."""
    table = {"num_speculative_tokens_per_batch_size": [[1, 3, K], [4, 8, 2], [9, 64, 0]]}
    ahead, step_by_step = make(method, keys=table), make(method, keys=table, ahead=False)
    found, expected = recorded(ahead), recorded(step_by_step)
    assert_same(run(ahead, mixed_work()), reference)
    assert_same(run(step_by_step, mixed_work()), reference)
    lengths = {len(tokens) for tokens in found.values()}
    assert {K, 2} <= lengths
    for key in found.keys() & expected.keys():
        length = min(len(found[key]), len(expected[key]))
        assert found[key][:length] == expected[key][:length]
    for most in (0, 1, 3):
        found.clear()
        run(ahead, long_work(2), max_draft_tokens=most)
        assert max((len(tokens) for tokens in found.values()), default=0) == most


@pytest.mark.parametrize("method", DRAFTING)
def test_chance_accepts_the_same_drafts(make: Make, method: str) -> None:
    """The rule `synthetic`: the text is the drafts' then, and is the same until one may reach its end."""
    keys = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    work = [(prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)) for prompt in prompts(5, seed=2)]
    ahead, step_by_step = make(method, keys=keys), make(method, keys=keys, ahead=False)
    seen = launched_ahead(ahead)
    results, expected = run(ahead, work), run(step_by_step, work)
    assert any(seen)
    sure = 60 - 2 * (K + 1)
    assert [r.token_ids[:sure] for r in results] == [r.token_ids[:sure] for r in expected]
    spec = ahead.stats().spec
    assert spec.num_accepted_tokens > 1.5 * spec.num_drafts


@pytest.mark.parametrize("method", HEADS)
def test_a_request_longer_than_the_heads_context_goes_on_without_it(make: Make, method: str, tiny_model: Path) -> None:
    limit = 40
    prompt = prompts(1, seed=3, shortest=50)[0]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    work = [(prompt[:length], params) for length in (20, 50)]
    ahead, step_by_step = (make(method, ahead=ahead, max_num_batched_tokens=24) for ahead in (True, False))
    for engine in (ahead, step_by_step):
        (member,) = engine.proposer.members  # type: ignore[attr-defined]
        head = member.proposer._head
        head.max_positions = limit
        head.blocks.cos, head.blocks.sin = head.blocks.cos[:limit], head.blocks.sin[:limit]
    found, expected = recorded(ahead), recorded(step_by_step)
    assert_same(run(ahead, work), run(make_engine(tiny_model), work))
    run(step_by_step, work)
    assert not any(tokens for (request_id, _), tokens in found.items() if request_id == "r1")
    last = max(position for (_, position), tokens in found.items() if tokens)
    assert limit - 2 * (K + 1) < last <= limit
    for key in found.keys() & expected.keys():
        length = min(len(found[key]), len(expected[key]))
        assert found[key][:length] == expected[key][:length]
    assert_idle(ahead)


@pytest.mark.parametrize("method", ["eagle3_coupled", "eagle3_min_prob", "eagle3_tree", "peagle", "suffix_then_eagle3"])
def test_what_only_the_host_can_draft_is_served_step_by_step(
    tiny_model: Path, draft_models: DraftModels, method: str
) -> None:
    engine = make_engine(tiny_model, METHODS[method](draft_models), async_scheduling=True)
    assert engine.device_step is None
    assert any("Each step waits for the one before: " in line for line in engine.info().log_lines)


def test_parts_that_are_put_in_place_of_the_engines_own_are_asked(make: Make) -> None:
    """As checks and benchmarks do: the device knows nothing of them."""
    engine = make(None)
    asked: list[int] = []

    def script(request: Request, length: int) -> RequestDraft:
        asked.append(length)
        return RequestDraft([1] * length, "scripted")

    engine.proposer, engine.control = ScriptedProposer(script), FixedLength(3)
    expected = run(make(None, ahead=False), long_work(2))
    assert_same(run(engine, long_work(2)), expected)
    assert asked
