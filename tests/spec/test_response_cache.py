"""Answers of earlier requests: what is continued from them, what is forgotten, and what it costs."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.plan import Plan, ScheduledRequest
from forerun.request import FinishReason, Request, SamplingParams
from forerun.spec.proposer import DraftInputs, Grant
from forerun.spec.proposers import suffix
from forerun.spec.proposers.suffix import SuffixProposer
from forerun.spec.response_cache import ResponseCache
from forerun.spec.suffix_tree import NO_SPECULATION, Speculation, SuffixTree
from forerun.spec.verifier import RequestVerdict, Verdict
from tests.spec.test_suffix import HISTORIES, count_lines, depths, factors, histories, min_probs


def occurrences(texts: list[list[int]], w: list[int]) -> list[tuple[int, int]]:
    """(text, place after w) of every occurrence."""
    return [
        (t, i + len(w))
        for t, text in enumerate(texts)
        for i in range(len(text) - len(w) + 1)
        if text[i : i + len(w)] == w
    ]


def continue_by_definition(
    texts: list[list[int]], end: list[int], max_depth: int, factor: float, min_prob: float, max_tokens: int
) -> Speculation:
    """Count everything anew; the context itself counts as one more occurrence that nothing has followed."""
    best = NO_SPECULATION
    for m in range(1, min(len(end), max_depth - 1) + 1):
        w, prob, more = end[-m:], 1.0, 1
        found: list[int] = []
        probs: list[float] = []
        limit = int(min(m * factor + 1e-6, max_tokens))
        while len(found) < limit and len(w) < max_depth:
            followed = [(texts[t][i], (t, i)) for t, i in occurrences(texts, w) if i < len(texts[t])]
            if not followed:
                break
            tokens = [x for x, _ in followed]
            token = max(tokens, key=lambda x: (tokens.count(x), max(place for y, place in followed if y == x)))
            prob *= tokens.count(token) / (len(occurrences(texts, w)) + more)
            if prob < min_prob:
                break
            found.append(token)
            probs.append(prob)
            w, more = [*w, token], 0
        if found and sum(probs) >= best.score:
            best = Speculation(found, probs, sum(probs))
    return best


@settings(deadline=None)
@given(
    st.lists(histories(max_size=20), min_size=1, max_size=5),
    histories(max_size=20),
    depths,
    factors,
    min_probs,
    st.integers(1, 16),
)
def test_a_text_goes_on_as_the_counts_over_all_sequences_say(
    texts: list[list[int]], end: list[int], depth: int, factor: float, min_prob: float, max_tokens: int
) -> None:
    tree = SuffixTree(depth, factor, min_prob)
    known: list[list[int]] = []
    for text in texts:
        for half in (text[: len(text) // 2], text[len(text) // 2 :]):  # also while a sequence is under way
            tree.extend(half)
            tree.check_integrity()
        known.append(text)
        for context in (end, text[:-1], end + text[:3]):
            expected = continue_by_definition(known, context, depth, factor, min_prob, max_tokens)
            assert tree.speculate_after(context, max_tokens) == expected
        tree.end_sequence()
        tree.check_integrity()
    assert tree.num_tokens == sum(map(len, texts))


@settings(deadline=None)
@given(histories(), depths, factors, min_probs, st.integers(1, 16))
def test_scores_are_those_of_a_tree_that_holds_the_end_too(
    tokens: list[int], depth: int, factor: float, min_prob: float, max_tokens: int
) -> None:
    """As a third sequence of different tokens, the context counts once and is followed by nothing: as was assumed."""
    apart, together = (SuffixTree(depth, factor, min_prob) for _ in range(2))
    context = list(dict.fromkeys(reversed(tokens)))[::-1]
    for tree in (apart, together):
        for text in (tokens, tokens[::-1]):
            tree.extend(text)
            tree.end_sequence()
    together.extend(context)
    assert apart.speculate_after(context, max_tokens) == together.speculate(max_tokens)


def make_cache(max_requests: int = 100, max_bytes: int = 1 << 30, depth: int = 8) -> ResponseCache:
    return ResponseCache(lambda: SuffixTree(depth, 1.0, 0.1), max_requests, max_bytes)


def remember(cache: ResponseCache, salt: str, *answers: list[int]) -> None:
    for answer in answers:
        cache.add(salt, answer)
    cache.enter(1 << 30)


def knows(cache: ResponseCache, salt: str, answer: list[int]) -> bool:
    return cache.speculate(salt, answer[:2], 1).tokens == answer[2:3]


def check(cache: ResponseCache) -> None:
    """What must hold between any two calls."""
    generations = [g for of_salt in cache._by_salt.values() for g in of_salt]
    assert set(generations) == set(cache._by_age)
    assert len(generations) == len(cache._by_age)
    assert all(cache._by_salt.values())
    assert cache.num_requests == sum(g.num_requests for g in generations) <= cache.max_requests
    waiting = sum(tokens.itemsize * len(tokens) for _, tokens in cache._waiting)
    assert cache.num_bytes >= sum(g.num_bytes for g in generations) + waiting
    assert cache.num_bytes <= cache.max_bytes or not (generations or cache._waiting)
    assert len(cache._waiting) <= cache.max_requests
    if not generations and not cache._waiting:
        assert cache.num_bytes == 0
    for generation in generations:
        assert generation.num_bytes >= generation.tree.num_bytes
        generation.tree.check_integrity()


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 60))
def test_the_newest_half_is_kept_and_never_more_than_the_bound(max_requests: int, num_answers: int) -> None:
    cache = make_cache(max_requests)
    answers = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(num_answers)]
    for count, answer in enumerate(answers, 1):
        remember(cache, "", answer)
        check(cache)
        kept = [knows(cache, "", a) for a in answers[:count]]
        assert kept == sorted(kept), "an older answer outlived a newer one"
        assert sum(kept) == cache.num_requests
        assert min(count, max_requests // 2 + 1) <= sum(kept) <= max_requests


def test_salts_never_see_each_others_answers() -> None:
    cache = make_cache()
    remember(cache, "mine", [1, 2, 3, 4])
    remember(cache, "", [1, 2, 9, 9])
    assert cache.speculate("mine", [1, 2], 2).tokens == [3, 4]
    assert cache.speculate("", [1, 2], 2).tokens == [9, 9]
    assert cache.speculate("yours", [1, 2], 2) == NO_SPECULATION


def test_a_new_salt_with_each_request_costs_a_bounded_memory() -> None:
    cache = make_cache(max_requests=1 << 30, max_bytes=1 << 20)
    for i in range(3000):
        remember(cache, f"salt {i}", [1, 2, 3] * 10)
        assert cache.num_bytes <= cache.max_bytes
    check(cache)
    assert 100 < len(cache._by_salt) < 500
    assert knows(cache, "salt 2999", [1, 2, 3])
    assert not knows(cache, "salt 0", [1, 2, 3])


def test_a_busy_salt_keeps_its_newest_answers_beside_others() -> None:
    """What goes is the generation whose last answer is the oldest, whosever it is."""
    cache = make_cache(max_requests=10)
    for i in range(30):
        remember(cache, "busy", [3 * i, 3 * i + 1, 3 * i + 2])
        if i % 5 == 0:
            remember(cache, "calm", [500 + i, 1, 2])
        check(cache)
        assert knows(cache, "busy", [3 * i, 3 * i + 1, 3 * i + 2])
        assert knows(cache, "calm", [500 + i - i % 5, 1, 2])


salts = st.sampled_from(["", "a", "b", "c"])
actions = st.lists(
    st.one_of(
        st.tuples(salts, st.lists(st.integers(0, 5), max_size=40)),
        st.integers(0, 30),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(actions, st.integers(0, 6), st.integers(0, 12_000))
def test_bounds_hold_whatever_comes_in_any_pieces(
    todo: list[tuple[str, list[int]] | int], max_requests: int, max_bytes: int
) -> None:
    cache = make_cache(max_requests, max_bytes)
    for action in todo:
        if isinstance(action, int):
            cache.enter(action)
        else:
            cache.add(*action)
        check(cache)
    cache.enter(1 << 30)
    check(cache)
    assert not cache._waiting


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 9))
def test_answers_that_come_in_pieces_are_the_same_answers(tokens: list[int], piece: int) -> None:
    whole, pieces = make_cache(), make_cache()
    remember(whole, "", tokens, tokens[::-1])
    pieces.add("", tokens)
    pieces.add("", tokens[::-1])
    while pieces._waiting:
        pieces.enter(piece)
    for end in range(1, len(tokens)):
        assert whole.speculate("", tokens[:end], 5) == pieces.speculate("", tokens[:end], 5)
    assert whole.num_requests == pieces.num_requests == 2


def test_one_answer_does_not_go_on_into_the_next() -> None:
    cache = make_cache()
    remember(cache, "", [1, 2, 3], [4, 5, 6])
    assert cache.speculate("", [2, 3], 3) == NO_SPECULATION
    cache = make_cache(max_requests=2)
    cache.add("", [1, 2, 3, 7])
    cache.enter(3)  # half-way, and then it is pushed out of those that wait
    for answer in ([4, 5, 6], [7, 8, 9]):
        cache.add("", answer)
    cache.enter(100)
    check(cache)
    assert cache.speculate("", [2, 3], 3) == NO_SPECULATION


# -- the proposer


def request_of(request_id: str, tokens: list[int], num_prompt: int, salt: str = "") -> Request:
    return Request(request_id, list(tokens), num_prompt, SamplingParams(), seed=0, cache_salt=salt)


def make_proposer(max_cached_requests: int = 100) -> SuffixProposer:
    return SuffixProposer(8, 1.0, 0.1, 8, max_cached_requests, 1 << 30)


def step(proposer: SuffixProposer, request: Request, said: list[int], reason: FinishReason | None = None) -> None:
    """What the engine does: observe, commit, and forget where the request is over."""
    plan = Plan([ScheduledRequest(request, request.num_tokens - 1, 1, samples=True)])
    verdict = RequestVerdict([], said, 0, finish_reason=reason)
    proposer.observe(plan, Verdict({request.request_id: verdict}), None)
    request.token_ids += said
    if reason is not None:
        proposer.forget(request.request_id)


def draft_of(proposer: SuffixProposer, request: Request, length: int = 8) -> list[int]:
    grant = Grant([request], {request.request_id: length})
    return proposer.propose(DraftInputs([request]), grant).of(request.request_id).tokens


def test_an_ended_answer_is_copied_from_and_a_prompt_is_not() -> None:
    proposer = make_proposer()
    first = request_of("a", [50, 51, 52, 1, 2], 3)
    step(proposer, first, [3, 4])
    assert draft_of(proposer, request_of("b", [9, 1, 2], 3)) == [], "an answer was copied from before it had ended"
    step(proposer, first, [5], FinishReason.STOP)
    assert draft_of(proposer, request_of("c", [9, 1, 2], 3)) == [3, 4]
    assert draft_of(proposer, request_of("d", [9, 4], 2)) == [5]
    assert draft_of(proposer, request_of("e", [9, 51], 2)) == []
    assert draft_of(proposer, request_of("f", [9, 1, 2], 3, salt="other")) == []


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_answer_that_did_not_end_by_itself_leaves_nothing(reason: FinishReason) -> None:
    proposer = make_proposer()
    request = request_of("a", [9, 1, 2, 3, 4], 1)
    step(proposer, request, [5])
    if reason is FinishReason.ABORT:
        proposer.forget("a")
    else:
        step(proposer, request, [], reason)
    assert proposer.cache.num_requests == 0
    assert draft_of(proposer, request_of("b", [8, 1, 2], 3)) == []


def test_a_preempted_answer_is_kept_once_and_as_a_whole() -> None:
    proposer = make_proposer()
    request = request_of("a", [9, 1], 1)
    for token in range(2, 8):
        step(proposer, request, [token])
        if token % 2:
            proposer.forget("a")  # preempted: it starts again from its known tokens
    step(proposer, request, [8], FinishReason.LENGTH)
    assert proposer.cache.num_requests == 1
    (generation,) = proposer.cache._by_age
    assert generation.tree.num_tokens == 8
    assert draft_of(proposer, request_of("b", [3, 4, 5, 6], 4)) == [7, 8]


def test_the_higher_score_wins_and_the_own_history_where_they_are_equal() -> None:
    proposer = make_proposer()
    step(proposer, request_of("a", [9, 1, 2, 3], 1), [4], FinishReason.STOP)
    assert draft_of(proposer, request_of("b", [1, 2, 7, 8, 5, 1, 2], 7)) == [7, 8], "equal: one occurrence each"
    step(proposer, request_of("c", [9, 1, 2, 3], 1), [4], FinishReason.STOP)
    assert draft_of(proposer, request_of("d", [1, 2, 7, 8, 5, 1, 2], 7)) == [3, 4], "twice among the answers"
    assert draft_of(proposer, request_of("e", [1, 2, 7, 8, 1, 2, 7, 8, 1, 2], 10)) == [7, 8, 1, 2], (
        "twice in the history"
    )


def test_requests_that_may_not_draft_teach_nothing() -> None:
    proposer = make_proposer()
    request = request_of("a", [9, 1, 2, 3], 1)
    request.max_draft_tokens = 0
    step(proposer, request, [4], FinishReason.STOP)
    assert proposer.state_bytes == make_proposer().state_bytes


def test_no_cache_is_kept_where_none_is_asked_for() -> None:
    proposer = make_proposer(max_cached_requests=0)
    before = proposer.state_bytes
    for _ in range(3):
        step(proposer, request_of("a", [9, 1, 2, 3], 1), [4], FinishReason.STOP)
    assert proposer.cache.num_requests == 0
    assert proposer.state_bytes <= before + 1000  # an emptied dict keeps its table
    assert draft_of(proposer, request_of("b", [8, 1, 2], 3)) == []


# -- cost


def cache_of(text: str, num_answers: int) -> SuffixProposer:
    proposer, rng = SuffixProposer(24, 1.0, 0.1, 24, 10_000, 1 << 30), random.Random(1)
    for i in range(num_answers):
        proposer.cache.add("", HISTORIES[text](500 + i % 7, rng))
    while proposer.cache._waiting:
        proposer.cache.enter(1 << 20)
    return proposer


@pytest.mark.parametrize("text", HISTORIES)
def test_work_of_a_proposal_does_not_grow_with_the_cache(text: str) -> None:
    lines: list[int] = []
    for num_answers in (2, 60):
        proposer = cache_of(text, num_answers)
        request = request_of("r", HISTORIES[text](200, random.Random(2)), 200)
        draft_of(proposer, request, 24)
        most = 0
        for token in HISTORIES[text](50, random.Random(3)):
            request.token_ids.append(token)
            most = max(most, count_lines(lambda p=proposer, r=request: draft_of(p, r, 24)))
        lines.append(most)
    # Twice 24 steps to find the place, and a second tree that may bring as much as the first.
    assert max(lines) <= 900 + 24 * 12 + 900
    if text == "no repetition":
        assert lines[1] <= lines[0] + 10


def test_a_step_takes_in_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_ENTERED_PER_STEP", 100)
    proposer = make_proposer()
    for name in "abc":
        step(proposer, request_of(name, [9, *range(150)], 1), [7], FinishReason.STOP)
    held = []
    while proposer.cache._waiting:
        proposer.observe(Plan(), Verdict(), None)
        held.append(sum(g.tree.num_tokens for g in proposer.cache._by_age))
    assert held == [400, 453]
    assert proposer.cache.num_requests == 3


@pytest.mark.parametrize("text", HISTORIES)
def test_bytes_are_told_within_a_factor_of_two_and_linear_in_what_is_cached(text: str) -> None:
    make: Callable[[int, random.Random], list[int]] = HISTORIES[text]
    answers = [make(200, random.Random(seed)) for seed in range(40)]
    proposer = SuffixProposer(24, 1.0, 0.1, 24, 1000, 1 << 30)
    proposer.cache.enter(1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for answer in answers:
            proposer.cache.add("", answer)
        proposer.cache.enter(1 << 20)
        held = tracemalloc.get_traced_memory()[0] - before
        told = proposer.state_bytes
        proposer.cache = make_cache()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    small = 16_000
    assert (held - small) / 2 <= told <= 2 * held + small
    assert held < 500 * 8000
    assert left <= small + held / 20
