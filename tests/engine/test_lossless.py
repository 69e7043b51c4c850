"""The first promise: with drafts, without drafts, alone, in company, in chunks, after preemption: the same text."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.kernels import native
from forerun.request import Request, SamplingParams
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer
from tests.tiny_engine import NGRAM, SUFFIX, Result, Work, chain, make_engine, oracle, prompts, run
from tests.tiny_tokenizer import VOCAB_SIZE

PARAMS = [
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=0, max_tokens=33, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, seed=6, max_tokens=40),
    SamplingParams(temperature=1.3, top_k=7, seed=7, max_tokens=21, logprobs=3),
    SamplingParams(temperature=0.5, seed=5, max_tokens=1),
]


def mixed_work(count: int = 12, seed: int = 0) -> Work:
    return [(prompt, PARAMS[place % len(PARAMS)]) for place, prompt in enumerate(prompts(count, seed=seed))]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[Result]:
    """Each request alone, without speculation."""
    return run(make_engine(tiny_model), mixed_work(), together=False)


def assert_same(results: list[Result], reference: list[Result]) -> None:
    for place, (result, expected) in enumerate(zip(results, reference, strict=True)):
        assert result.key == expected.key, f"request {place} differs"
        assert [e.token_id for e in result.logprobs] == [e.token_id for e in expected.logprobs]
        assert [(e.logprob, e.rank, e.top) for e in result.logprobs] == [
            (e.logprob, e.rank, e.top) for e in expected.logprobs
        ]


SETTINGS: dict[str, dict[str, Any]] = {
    "wide": {},
    "small_budget": {"max_num_batched_tokens": 12, "max_num_seqs": 3},
    "few_blocks": {"kv_cache_memory_bytes": 160 << 10, "max_model_len": 120},
    "two_at_a_time": {"max_num_seqs": 2},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "blocks_of_4": {"block_size": 4},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("spec", [None, NGRAM, SUFFIX], ids=["plain", "ngram", "suffix"])
def test_text_does_not_depend_on_drafts_or_company(
    tiny_model: Path, reference: list[Result], spec: dict[str, Any] | None, settings: dict[str, Any]
) -> None:
    engine = make_engine(tiny_model, spec, **settings)
    assert_same(run(engine, mixed_work()), reference)
    if "kv_cache_memory_bytes" in settings:
        assert engine.stats().num_preemptions > 0
    if spec is not None:
        assert engine.stats().spec.num_draft_tokens > 0
    assert_same(run(engine, mixed_work()), reference)  # again, with whatever the prefix cache holds now


@pytest.mark.skipif(not native.available(), reason="the CPU extension is not built")
def test_packed_weights_keep_the_promise(tiny_model: Path) -> None:
    """The same with int8 weights, through the native kernels alone."""
    expected = run(make_engine(tiny_model, quantization="int8"), mixed_work(), together=False)
    for spec, settings in [(NGRAM, {}), (SUFFIX, SETTINGS["small_budget"]), (SUFFIX, SETTINGS["few_blocks"])]:
        engine = make_engine(tiny_model, spec, quantization="int8", **settings)
        assert_same(run(engine, mixed_work()), expected)
        assert engine.stats().spec.num_draft_tokens > 0


@pytest.mark.parametrize("packed", [True, False], ids=["native", "torch"])
def test_without_the_extension_torch_serves(
    tiny_model: Path, reference: list[Result], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain torch path, which is what runs where nothing could be compiled; it says so at start."""
    if not packed:
        monkeypatch.setattr(native, "_native", None)
    elif not native.available():
        pytest.skip("the CPU extension is not built")
    engine = make_engine(tiny_model, SUFFIX)
    said = any("CPU extension is not built" in line for line in engine.info().log_lines)
    assert said != packed
    expected = run(make_engine(tiny_model), mixed_work(), together=False)
    assert_same(run(engine, mixed_work()), expected)


def test_batch_invariant_changes_nothing_on_a_cpu(tiny_model: Path, reference: list[Result]) -> None:
    engine = make_engine(tiny_model, NGRAM, batch_invariant=True)
    assert engine.info().exact_rows
    assert_same(run(engine, mixed_work()), reference)


def _right(tokens: list[int], rng: random.Random) -> RequestDraft:
    return chain(tokens)


def _wrong(tokens: list[int], rng: random.Random) -> RequestDraft:
    return chain([(t + 1) % VOCAB_SIZE for t in tokens])


def _empty(tokens: list[int], rng: random.Random) -> RequestDraft:
    return chain([])


def _random(tokens: list[int], rng: random.Random) -> RequestDraft:
    return chain([rng.randrange(VOCAB_SIZE) for _ in tokens])


def _partly_right(tokens: list[int], rng: random.Random) -> RequestDraft:
    return chain([t if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE) for t in tokens][: rng.randint(0, 8)])


def _overlong(tokens: list[int], rng: random.Random) -> RequestDraft:
    return chain(tokens + [rng.randrange(VOCAB_SIZE) for _ in range(30)])


def _tree(tokens: list[int], rng: random.Random) -> RequestDraft:
    """A random tree that holds the right path somewhere: decoys before, between and below its nodes."""
    nodes: list[int] = []
    parents: list[int] = []
    right = -1
    for token in tokens:
        siblings = [token] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 2))]
        rng.shuffle(siblings)
        seen: set[int] = set()
        parent = right
        for sibling in siblings:
            if sibling in seen:
                continue
            seen.add(sibling)
            nodes.append(sibling)
            parents.append(parent)
            if sibling == token:
                right = len(nodes) - 1
            elif rng.random() < 0.3:
                nodes.append(rng.randrange(VOCAB_SIZE))
                parents.append(len(nodes) - 2)
    return RequestDraft(nodes, "scripted", parents)


SCRIPTS = [_right, _wrong, _empty, _random, _partly_right, _overlong, _tree]


@pytest.mark.parametrize("settings", [{}, SETTINGS["few_blocks"]], ids=["wide", "few_blocks"])
@pytest.mark.parametrize("shape", SCRIPTS, ids=lambda shape: shape.__name__.strip("_"))
def test_text_does_not_depend_on_what_is_drafted(
    tiny_model: Path,
    reference: list[Result],
    shape: Callable[[list[int], random.Random], RequestDraft],
    settings: dict[str, Any],
) -> None:
    work = mixed_work()
    texts = {tuple(prompt): result.token_ids for (prompt, _), result in zip(work, reference, strict=True)}
    continuation = oracle(texts)
    rng = random.Random(1)

    def script(request: Request, length: int) -> RequestDraft:
        return shape(continuation(request, length), rng)

    proposer = ScriptedProposer(script)
    engine = make_engine(tiny_model, proposer, length=9, **settings)
    results = run(engine, work)
    assert_same(results, reference)
    spec = engine.stats().spec
    if shape is _right:
        assert spec.num_accepted_tokens == spec.num_draft_tokens > 0
    if shape is _tree:
        assert spec.num_accepted_tokens > 0.5 * spec.num_drafts, "the right path stands in every tree"
    if shape is _empty:
        assert spec.num_drafts == 0
    if settings:
        assert engine.stats().num_preemptions > 0
        assert proposer.forgotten


def test_the_reference_is_worth_comparing(reference: list[Result]) -> None:
    """Texts differ from one another and do not collapse to one repeated token."""
    texts = [tuple(r.token_ids) for r in reference if len(r.token_ids) > 15]
    assert len(set(texts)) == len(texts) >= 8
    assert sum(len(set(text)) > 6 for text in texts) >= 6
