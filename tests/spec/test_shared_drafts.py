"""Drafts that requests learn from each other, and the rule `standard`, in the real loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.request import Request, SamplingParams
from forerun.spec.proposer import Proposer, RequestDraft
from forerun.spec.proposers.first import FirstOf
from forerun.spec.proposers.ngram_mod import NgramModProposer
from forerun.spec.proposers.suffix import SuffixProposer
from forerun.spec.verifiers.standard import StandardVerifier
from forerun.testing import ScriptedProposer
from tests.engine.test_lossless import SETTINGS, assert_same, mixed_work
from tests.tiny_engine import SUFFIX, Result, finish, make_engine, oracle, run
from tests.tiny_tokenizer import VOCAB_SIZE

CACHED_SUFFIX = SUFFIX | {"suffix_decoding_max_cached_requests": 1000}
NGRAM_MOD = {"method": "ngram_mod", "num_speculative_tokens": 8, "ngram_mod_n_match": 3, "ngram_mod_n_min": 2}
SHARED = [CACHED_SUFFIX, NGRAM_MOD]
METHODS = [str(spec["method"]) for spec in SHARED]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[Result]:
    """Each request alone, without speculation."""
    return run(make_engine(tiny_model), mixed_work(), together=False)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("spec", SHARED, ids=METHODS)
def test_text_does_not_depend_on_what_others_said(
    tiny_model: Path, reference: list[Result], spec: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Twice in one engine: the second time everything was said before."""
    engine = make_engine(tiny_model, spec, **settings)
    accepted = []
    for _ in range(2):
        before = engine.stats().spec.num_accepted_tokens
        assert_same(run(engine, mixed_work()), reference)
        accepted.append(engine.stats().spec.num_accepted_tokens - before)
    assert accepted[1] > 1.5 * accepted[0], "nothing was learnt from the first time"
    assert accepted[1] > 0.3 * sum(len(result.token_ids) for result in reference)
    if "kv_cache_memory_bytes" in settings:
        assert engine.stats().num_preemptions > 0


def only_member(engine: Engine) -> Proposer:
    assert isinstance(engine.proposer, FirstOf)
    (member,) = engine.proposer.members
    return member.proposer


def cached_answers(engine: Engine) -> list[int]:
    """Tokens of each generation of remembered answers."""
    proposer = only_member(engine)
    assert isinstance(proposer, SuffixProposer)
    cache = proposer.cache
    while cache._waiting:
        cache.enter(1 << 20)
    return [generation.tree.num_tokens for generation in cache._by_age]


def test_an_answer_is_remembered_once_and_up_to_its_stop_whatever_preemptions(
    tiny_model: Path, reference: list[Result]
) -> None:
    engine = make_engine(tiny_model, CACHED_SUFFIX, **SETTINGS["few_blocks"])
    run(engine, mixed_work())
    assert engine.stats().num_preemptions > 0
    assert cached_answers(engine) == [sum(len(result.token_ids) for result in reference)]


@pytest.mark.parametrize("spec", SHARED, ids=METHODS)
def test_aborts_leave_the_others_their_text(tiny_model: Path, reference: list[Result], spec: dict[str, Any]) -> None:
    """Every third request is aborted on its way, in random steps; then the same work again, undisturbed."""
    engine, work, rng = make_engine(tiny_model, spec), mixed_work(), random.Random(3)
    results = {f"r{place}": Result() for place in range(len(work))}
    for place, (prompt, params) in enumerate(work):
        seed = params.seed if params.seed is not None else place
        engine.add_request(NewRequest(f"r{place}", list(prompt), params, seed))
    doomed = [f"r{place}" for place in range(0, len(work), 3)]
    rng.shuffle(doomed)
    for request_id in doomed:
        for output in engine.step().outputs:
            results[output.request_id].add(output)
        engine.abort_requests([request_id])
    finish(engine, results)
    for place, expected in enumerate(reference):
        said = results[f"r{place}"].token_ids
        assert said == (expected.token_ids[: len(said)] if f"r{place}" in doomed else expected.token_ids)
    if spec is CACHED_SUFFIX:
        ended = [r for r in results.values() if r.outputs and r.last.finish_reason is not None]
        assert len(ended) < len(work)
        assert sum(cached_answers(engine)) == sum(len(result.token_ids) for result in ended)
    assert_same(run(engine, work), reference)


@pytest.mark.parametrize("spec", SHARED, ids=METHODS)
def test_drafts_are_shared_within_a_salt_and_not_between_two(tiny_model: Path, spec: dict[str, Any]) -> None:
    """The same work under three salts in turn: a salt's first time is as in an engine that never saw it."""

    def per_step(engine: Engine, salt: str) -> list[list[int]]:
        results = run(engine, mixed_work(), cache_salt=salt)
        return [r.last.metrics.speculative_decoding["per_step_drafted"] for r in results if r.last.metrics]  # type: ignore[index]

    settings = {"enable_prefix_caching": False}  # else steps differ
    alone = per_step(make_engine(tiny_model, spec, **settings), "mine")
    engine = make_engine(tiny_model, spec, **settings)
    assert per_step(engine, "mine") == alone
    assert per_step(engine, "yours") == alone
    assert per_step(engine, "") == alone
    learnt = per_step(engine, "mine")
    assert learnt != alone
    assert sum(map(len, learnt)) < sum(map(len, alone)) or sum(map(sum, learnt)) > sum(map(sum, alone))


def test_state_is_told_and_bounded_with_a_new_salt_for_each_request(tiny_model: Path) -> None:
    for spec in SHARED:
        engine = make_engine(tiny_model, spec)
        proposer = only_member(engine)
        if isinstance(proposer, NgramModProposer):
            bound = proposer.pools.max_bytes = 20_000
        else:
            assert isinstance(proposer, SuffixProposer)
            bound = proposer.cache.max_bytes = 50_000
        most = 0
        for place in range(30):
            run(engine, mixed_work(2), cache_salt=f"salt {place}")
            most = max(most, engine.stats().proposer_bytes)
        assert bound / 2 < most < bound + 2000


# -- the rule `standard`


def with_probs(tokens: list[int], rng: random.Random) -> RequestDraft:
    """Drafts whose q is random, and sometimes absent."""
    if rng.random() < 0.2:
        return RequestDraft(tokens, "scripted")
    probs = torch.rand(len(tokens), VOCAB_SIZE, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    for row, token in enumerate(tokens):
        probs[row, token] += VOCAB_SIZE / 4
    return RequestDraft(tokens, "scripted", probs=probs / probs.sum(dim=1, keepdim=True))


@pytest.mark.parametrize(
    "settings", [{}, SETTINGS["few_blocks"], SETTINGS["small_budget"]], ids=["wide", "few", "small"]
)
def test_standard_keeps_the_greedy_texts_and_serves_the_others_beside_them(
    tiny_model: Path, reference: list[Result], settings: dict[str, Any]
) -> None:
    work = mixed_work()
    continuation = oracle({tuple(p): r.token_ids for (p, _), r in zip(work, reference, strict=True)})
    rng = random.Random(1)

    def script(request: Request, length: int) -> RequestDraft:
        right = continuation(request, length) or [5]
        return with_probs([t if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for t in right], rng)

    engine = make_engine(tiny_model, ScriptedProposer(script), length=6, **settings)
    engine.verifier = StandardVerifier()
    results = run(engine, work)
    greedy = [place for place, (_, params) in enumerate(work) if params.greedy]
    assert_same([results[place] for place in greedy], [reference[place] for place in greedy])
    for result, (_, params) in zip(results, work, strict=True):
        assert len(result.token_ids) <= (params.max_tokens or 0)
        assert result.last.finish_reason is not None
        assert len(result.logprobs) == (len(result.token_ids) if params.logprobs is not None else 0)
    spec = engine.stats().spec
    assert 0 < spec.num_accepted_tokens < spec.num_draft_tokens


def test_standard_without_probabilities_is_match_in_the_whole_loop(tiny_model: Path, reference: list[Result]) -> None:
    engine = make_engine(tiny_model, CACHED_SUFFIX)
    engine.verifier = StandardVerifier()
    assert_same(run(engine, mixed_work()), reference)
    assert engine.stats().spec.num_accepted_tokens > 0


def test_a_draft_that_draws_as_the_target_does_is_accepted_whole(tiny_model: Path) -> None:
    """q is the target's own p, read off its logprobs of every token: all is accepted, whatever is drawn."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    engine = make_engine(tiny_model, ScriptedProposer(lambda request, length: RequestDraft([])), length=3)
    engine.verifier = StandardVerifier()
    probe = make_engine(tiny_model)

    def next_probs(tokens: list[int]) -> torch.Tensor:
        logits: list[torch.Tensor] = []
        verify = probe.verifier.verify

        def spy(draft: Any, target_logits: torch.Tensor, sampling: Any) -> Any:
            logits.append(target_logits[0].clone())
            return verify(draft, target_logits, sampling)

        probe.verifier.verify = spy  # type: ignore[method-assign]
        run(probe, [(tokens, SamplingParams(temperature=0, max_tokens=1))])
        probe.verifier.verify = verify  # type: ignore[method-assign]
        return logits[0].softmax(0)

    rng = torch.Generator().manual_seed(0)

    def script(request: Request, length: int) -> RequestDraft:
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        for _ in range(length):
            rows.append(next_probs([*request.token_ids, *tokens]))
            tokens.append(int(torch.multinomial(rows[-1], 1, generator=rng)))
        return RequestDraft(tokens, "scripted", probs=torch.stack(rows))

    engine.proposer = ScriptedProposer(script)
    run(engine, [([5, 6, 7, 8], params), ([9, 8, 7], params)])
    spec = engine.stats().spec
    assert spec.num_accepted_tokens == spec.num_draft_tokens > 20
