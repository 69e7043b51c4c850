"""The offline benchmark on a tiny model: the same figures as a server's, and a profile whose parts are the whole."""

from __future__ import annotations

import pytest

from forerun import LLM, SamplingParams
from forerun.bench.datasets import Sample
from forerun.bench.offline import DECODE, PROMPT, OfflineRun, profile_object, run_offline
from tests.tiny_engine import prompts, save_tiny_target

NUM_TOKENS = 40
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PARAMS = SamplingParams(temperature=0, ignore_eos=True)
SAMPLES = [Sample(ids, NUM_TOKENS, "even" if place % 2 else "odd") for place, ids in enumerate(prompts(6))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target = save_tiny_target(tmp_path_factory.mktemp("target"))
    return LLM(str(target), speculative_config=NGRAM, device="cpu", kv_cache_memory_bytes=8 << 20)


@pytest.fixture(scope="module")
def run(llm: LLM) -> OfflineRun:
    return run_offline(llm, SAMPLES, PARAMS, concurrency=3)


def test_every_prompt_is_answered_as_llm_answers_it(llm: LLM, run: OfflineRun) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_TOKENS)
    outputs = llm.generate([list(sample.prompt) for sample in SAMPLES], params)  # type: ignore[arg-type]
    assert [outcome.text for outcome in run.measured.run.outcomes] == [output.outputs[0].text for output in outputs]
    assert all(outcome.ok and outcome.num_tokens == NUM_TOKENS for outcome in run.measured.run.outcomes)


def test_times_add_up_to_the_latency(run: OfflineRun) -> None:
    for outcome in run.measured.run.outcomes:
        assert outcome.ttft_s is not None
        assert outcome.ttft_s + sum(outcome.itls_s) == pytest.approx(outcome.latency_s)


def test_acceptance_by_category_is_that_of_the_whole(run: OfflineRun) -> None:
    spec, parts = run.measured.spec, [part for part in run.measured.by_category.values() if part is not None]
    assert spec is not None
    assert len(parts) == 2
    assert spec.num_draft_tokens == sum(part.num_draft_tokens for part in parts) > 0
    assert spec.num_accepted_tokens == sum(part.num_accepted_tokens for part in parts)
    assert spec.num_drafts == sum(part.num_drafts for part in parts)


def test_the_parts_of_a_step_are_the_step(run: OfflineRun) -> None:
    for kind in (DECODE, PROMPT):
        parts = profile_object(run.profile)[kind]
        assert parts["steps"] > 0
        assert min(parts["draft"], parts["target"], parts["verify"], parts["host"]) > 0
        assert parts["draft"] + parts["target"] + parts["verify"] + parts["host"] == pytest.approx(parts["step"])
    total = sum(times.total_s for times in run.profile.values())
    assert total <= run.measured.run.duration_s


def test_the_profile_counts_every_step_of_the_run(llm: LLM) -> None:
    before = llm.stats.num_steps
    again = run_offline(llm, SAMPLES, PARAMS, concurrency=6, num_warmups=0)
    assert sum(times.num_steps for times in again.profile.values()) == llm.stats.num_steps - before


def test_a_prompt_that_is_too_long_fails_alone(llm: LLM) -> None:
    samples = [SAMPLES[0], Sample([5] * 300, 4), SAMPLES[1]]
    outcomes = run_offline(llm, samples, PARAMS, concurrency=2).measured.run.outcomes
    assert [outcome.ok for outcome in outcomes] == [True, False, True]
    assert "max_model_len is 256" in outcomes[1].error


def test_an_interruption_keeps_what_was_answered(llm: LLM) -> None:
    def stop(_: object) -> None:
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    done: list[int] = []
    run = run_offline(llm, SAMPLES, PARAMS, concurrency=1, done=stop).measured.run
    assert run.interrupted
    assert len(run.outcomes) == 2
    assert not llm.engine.has_work


def test_waiting_for_the_device_is_part_of_every_part(llm: LLM) -> None:
    calls: list[int] = []
    llm.engine.profile(lambda: calls.append(1))
    before = llm.stats.num_steps
    try:
        run_offline(llm, SAMPLES[:1], PARAMS, concurrency=1, num_warmups=0)
    finally:
        llm.engine.profile(lambda: None)
    assert len(calls) == 5 * (llm.stats.num_steps - before)  # drafts are timed twice: proposing and observing
