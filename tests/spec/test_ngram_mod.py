"""The hash pool against a dictionary, how its drafts are made, who shares it, and what it costs."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.plan import Plan, ScheduledRequest
from forerun.request import FinishReason, Request, SamplingParams
from forerun.spec.config import SpeculativeConfig
from forerun.spec.proposer import Draft, DraftInputs, Grant
from forerun.spec.proposers import history
from forerun.spec.proposers.ngram_mod import MAX_FULL_POOLS, MAX_PROBES, NgramModProposer, NgramPool, NgramPools
from forerun.spec.registry import WEIGHTLESS
from forerun.spec.verifier import RequestVerdict, Verdict
from tests.spec.test_suffix import HISTORIES, count_lines, histories

POOL = 1 << 16


def request_of(request_id: str, tokens: list[int], salt: str = "") -> Request:
    return Request(request_id, list(tokens), len(tokens), SamplingParams(), seed=0, cache_salt=salt)


def propose(proposer: NgramModProposer, requests: list[Request], **lengths: int) -> Draft:
    return proposer.propose(DraftInputs(requests), Grant(requests, lengths))


def draft_of(proposer: NgramModProposer, tokens: list[int], length: int = 8, salt: str = "") -> list[int]:
    request = request_of("new", tokens, salt)
    tokens = propose(proposer, [request], new=length).of("new").tokens
    proposer.forget("new")
    return tokens


def chain_by_definition(followed: dict[tuple[int, ...], int], tokens: list[int], n: int, length: int) -> list[int]:
    grown = list(tokens)
    while len(grown) < len(tokens) + length and tuple(grown[-n:]) in followed and len(tokens) >= n:
        grown.append(followed[tuple(grown[-n:])])
    return grown[len(tokens) :]


@settings(deadline=None)
@given(
    st.lists(histories(), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 12), st.integers(1, 12), st.data()
)
def test_drafts_are_those_of_a_dictionary_that_requests_share(
    texts: list[list[int]], n: int, n_min: int, k: int, data: st.DataObject
) -> None:
    """Requests grow in turns, in pieces of any size; every n-gram leads to what followed it last, whoever said it."""
    proposer = NgramModProposer(n, n_min, POOL, k)
    requests = [request_of(str(i), []) for i in range(len(texts))]
    followed: dict[tuple[int, ...], int] = {}
    while any(r.num_tokens < len(text) for r, text in zip(requests, texts, strict=True)):
        request, text = data.draw(st.sampled_from(list(zip(requests, texts, strict=True))))
        start = request.num_tokens
        request.token_ids += text[start : start + data.draw(st.integers(1, 20))]
        if start == request.num_tokens:
            continue
        for place in range(max(start, n), request.num_tokens):
            followed[tuple(text[place - n : place])] = text[place]
        draft = propose(proposer, [request], **{request.request_id: k})
        chain = chain_by_definition(followed, request.token_ids, n, max(n_min, k))
        assert draft.of(request.request_id).tokens == (chain[:k] if len(chain) >= n_min else [])
        assert bool(draft.of(request.request_id).tokens) == (request.request_id in draft.by_request)


@settings(deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 3000), st.integers(1, 400))
def test_until_it_is_full_a_pool_is_a_dictionary(seed: int, num_puts: int, num_keys: int) -> None:
    rng = random.Random(seed)
    keys = [rng.getrandbits(61) for _ in range(num_keys)]
    pool, expected = NgramPool(POOL), dict[int, int]()
    for _ in range(num_puts):
        key, token = rng.choice(keys), rng.choice([0, 1, 151_936, (1 << 24) - 2])
        pool.put(key, token)
        expected[key] = token
        if rng.random() < 0.1:
            probe = rng.choice(keys)
            assert pool.find(probe) == expected.get(probe, -1)
    assert [pool.find(key) for key in keys] == [expected.get(key, -1) for key in keys]


@pytest.mark.parametrize("max_bytes", [64, 100, 1000, 4096, 1 << 16, 100_000])
def test_a_full_pool_keeps_what_came_last_and_its_size(max_bytes: int) -> None:
    rng = random.Random(max_bytes)
    pool, keys = NgramPool(max_bytes), [rng.getrandbits(61) for _ in range(20_000)]
    for i, key in enumerate(keys):
        pool.put(key, i)
        assert pool.num_bytes <= max_bytes
        assert pool.find(key) == i
    half = pool._max_slots // 2  # a table gives way when the next is half full
    missing = sum(pool.find(key) != i for i, key in enumerate(keys[-half:], len(keys) - half))
    assert missing <= 0.002 * half, "more were overwritten than the bound on probes explains"
    assert sum(pool.find(key) >= 0 for key in keys) <= pool._max_slots


def test_keys_made_to_collide_cost_a_bounded_number_of_probes() -> None:
    pool = NgramPool(1 << 20)
    for i in range(5000):
        pool.put(i << 20, i)  # all of one home slot
    assert count_lines(pool.put, 5001 << 20, 1) <= 6 * MAX_PROBES * 6
    assert count_lines(pool.find, 6001 << 20) <= 2 * MAX_PROBES * 6
    assert pool.find(5001 << 20) == 1, "the newest is there all the same"


def test_ids_that_do_not_fit_are_left_out() -> None:
    pool = NgramPool(POOL)
    pool.put(7, (1 << 24) - 1)
    assert pool.find(7) == -1


def test_a_draft_of_fewer_tokens_than_the_minimum_is_dropped() -> None:
    text = list(range(100, 130))
    for n_min, expected in ((0, text[4:]), (26, text[4:]), (27, [])):
        proposer = NgramModProposer(4, n_min, POOL, 64)
        propose(proposer, [request_of("a", text)], a=1)
        assert draft_of(proposer, text[:4], 64) == expected


def test_the_minimum_is_about_what_the_pool_knows_and_not_about_what_may_be_drafted() -> None:
    text = list(range(100, 130))
    proposer = NgramModProposer(4, 20, POOL, 64)
    propose(proposer, [request_of("a", text)], a=1)
    assert draft_of(proposer, text[:4], 3) == text[4:7]
    assert draft_of(proposer, text[:12], 3) == []


def test_salts_never_see_each_others_tokens() -> None:
    proposer = NgramModProposer(2, 0, POOL, 8)
    propose(proposer, [request_of("a", [1, 2, 3, 4], "mine"), request_of("b", [1, 2, 9, 8])], a=1, b=1)
    assert draft_of(proposer, [7, 1, 2], salt="mine") == [3, 4]
    assert draft_of(proposer, [7, 1, 2]) == [9, 8]
    assert draft_of(proposer, [7, 1, 2], salt="yours") == []


def test_the_last_tokens_of_an_answer_enter_when_it_ends_and_what_is_aborted_stays_as_far_as_it_came() -> None:
    proposer = NgramModProposer(2, 0, POOL, 8)
    for name, reason in (("a", FinishReason.STOP), ("b", FinishReason.ERROR)):
        request = request_of(name, [ord(name), 1, 2], salt=name)
        plan = Plan([ScheduledRequest(request, 2, 1, samples=True)])
        proposer.observe(plan, Verdict({name: RequestVerdict([], [3, 4], 0, finish_reason=reason)}), None)
        proposer.forget(name)
    assert draft_of(proposer, [7, 1, 2], salt="a") == [3, 4]
    assert draft_of(proposer, [7, 1, 2], salt="b") == []


def test_a_preempted_request_goes_on_as_before() -> None:
    proposer, text = NgramModProposer(2, 0, POOL, 8), [1, 2, 3, 4, 5, 1, 2]
    request = request_of("a", text)
    before = propose(proposer, [request], a=3).of("a").tokens
    pool = proposer.pools.find("")
    assert pool is not None
    held = [pool.num_bytes, pool._newer._num_used]
    proposer.forget("a")
    assert propose(proposer, [request], a=3).of("a").tokens == before == [3, 4, 5]
    assert [pool.num_bytes, pool._newer._num_used] == held


def test_the_pool_that_was_not_used_for_longest_is_given_up() -> None:
    pools = NgramPools(4096, 8192)

    def use(salt: str) -> None:
        pool = pools.open(salt)
        for i in range(100):
            pool.put(i * 0x9E3779B97F4A7C15, i)
        pools.settle(salt)

    for salt in "ab":
        use(salt)
    use("a")
    use("c")
    assert pools.find("b") is None
    assert pools.find("a") is not None
    assert pools.find("c") is not None
    assert pools.num_bytes == sum(pools._bytes.values()) <= pools.max_bytes
    assert set(pools._bytes) == set(pools._pools)


def test_a_new_salt_with_each_request_costs_a_bounded_memory_and_running_requests_go_on() -> None:
    proposer = NgramModProposer(2, 0, POOL, 8)
    steady = request_of("steady", [1, 2, 3] * 4, "steady")
    most = MAX_FULL_POOLS * POOL
    for i in range(3000):
        propose(proposer, [request_of(str(i), [5, 6, 7] * 40, f"salt {i}")], **{str(i): 4})
        proposer.forget(str(i))
        if i % 700 == 0:  # longer than pools of that many salts last
            steady.token_ids += [1, 2, 3] * 2
            draft = propose(proposer, [steady], steady=4).of("steady").tokens
            assert draft == [1, 2, 3, 1]
        assert proposer.pools.num_bytes <= most
    assert 100 < len(proposer.pools) < 500


def test_the_prompt_is_entered_along_with_its_chunks_and_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, request = NgramModProposer(3, 0, POOL, 4), request_of("a", [1, 2, 3] * 100)
    for start in range(0, 300, 60):
        proposer.observe(Plan([ScheduledRequest(request, start, 60)]), Verdict(), None)
        assert proposer._indexes["a"].num_tokens == start + 60
    assert propose(proposer, [request], a=4).of("a").tokens == [1, 2, 3, 1]
    proposer.forget("a")
    monkeypatch.setattr(history, "MAX_INDEXED_PER_CALL", 100)
    assert [len(propose(proposer, [request], a=4).of("a")) for _ in range(4)] == [0, 0, 4, 4]


def test_made_from_a_configuration() -> None:
    config = SpeculativeConfig.parse(
        {"method": "ngram_mod", "ngram_mod_n_match": 7, "ngram_mod_n_min": 3, "ngram_mod_pool_bytes": 1000}
    )
    proposer = WEIGHTLESS["ngram_mod"](config.methods[0])
    assert isinstance(proposer, NgramModProposer)
    assert (proposer.n_match, proposer.n_min, proposer.num_speculative_tokens) == (7, 3, 64)
    assert (proposer.pools.pool_bytes, proposer.pools.max_bytes) == (1000, 8000)
    assert (proposer.name, proposer.hidden_taps) == ("ngram_mod", ())


def lines_of_steps(text: str, size: int) -> list[int]:
    """Lines executed by each of 50 proposals of up to 64 tokens, with one new token before each."""
    tokens = HISTORIES[text](size, random.Random(1))
    proposer, request = NgramModProposer(24, 0, 1 << 24, 64), request_of("a", tokens[:-50])
    while "a" not in proposer._indexes or proposer._indexes["a"].num_tokens < request.num_tokens:
        propose(proposer, [request], a=1)
    lines = []
    for token in tokens[-50:]:
        request.token_ids.append(token)
        lines.append(count_lines(lambda: propose(proposer, [request], a=64)))
    return lines


@pytest.mark.parametrize("text", HISTORIES)
def test_work_of_a_proposal_does_not_depend_on_what_was_seen(text: str) -> None:
    short, long = lines_of_steps(text, 500), lines_of_steps(text, 20_000)
    assert max(short + long) <= 64 * 30 + 400
    if text in ("one token", "no repetition"):
        assert max(long) <= max(short) + 100


def test_bytes_are_told_within_a_factor_of_two_and_bounded() -> None:
    proposer, rng = NgramModProposer(4, 0, 1 << 18, 8), random.Random(1)
    propose(proposer, [], a=1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(40):
            tokens = [rng.randrange(1000) for _ in range(3000)]
            propose(proposer, [request_of("a", tokens, f"salt {i % 3}")], a=1)
            proposer.forget("a")
            del tokens
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert (held - 16_000) / 2 <= proposer.state_bytes <= 2 * held
    assert proposer.state_bytes <= 3 * ((1 << 18) + 2048)
