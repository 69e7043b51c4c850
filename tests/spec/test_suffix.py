"""Suffix decoding against its definition by counting, and what it costs."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.plan import Plan, ScheduledRequest
from forerun.request import Request, SamplingParams
from forerun.spec.config import MethodConfig
from forerun.spec.proposer import Draft, DraftInputs, Grant
from forerun.spec.proposers import history
from forerun.spec.proposers.suffix import SuffixProposer
from forerun.spec.suffix_tree import Speculation, SuffixTree
from forerun.spec.verifier import Verdict


def make_request(request_id: str, tokens: list[int]) -> Request:
    return Request(request_id, list(tokens), len(tokens), SamplingParams(), seed=0)


def propose(proposer: SuffixProposer, requests: list[Request], **lengths: int) -> Draft:
    return proposer.propose(DraftInputs(requests), Grant(requests, lengths))


def count_by_definition(tokens: list[int], w: list[int]) -> int:
    return sum(tokens[i : i + len(w)] == w for i in range(len(tokens) - len(w) + 1))


def speculate_by_definition(
    tokens: list[int], max_depth: int, max_spec_factor: float, min_token_prob: float, max_tokens: int
) -> Speculation:
    """Count everything anew for every context and every step; of next tokens as frequent the one seen last."""
    best = Speculation([], [], 0.0)
    for m in range(1, min(len(tokens), max_depth)):
        w, prob = tokens[-m:], 1.0
        found: list[int] = []
        probs: list[float] = []
        limit = int(min(m * max_spec_factor + 1e-6, max_tokens))
        while len(found) < limit and len(w) < max_depth:
            counts: dict[int, int] = {}
            seen: dict[int, int] = {}
            for i in range(len(w), len(tokens)):
                if tokens[i - len(w) : i] == w:
                    counts[tokens[i]] = counts.get(tokens[i], 0) + 1
                    seen[tokens[i]] = i
            if not counts:
                break
            token = max(counts, key=lambda x: (counts[x], seen[x]))
            prob *= counts[token] / count_by_definition(tokens, w)
            if prob < min_token_prob:
                break
            found.append(token)
            probs.append(prob)
            w = [*w, token]
        if sum(probs) >= best.score:
            best = Speculation(found, probs, sum(probs))
    return best


@st.composite
def histories(draw: st.DrawFn, max_size: int = 45) -> list[int]:
    """Random over few letters, a period repeated, or a period with faults."""
    letters = st.integers(0, draw(st.sampled_from([0, 1, 2, 4, 100])))
    if draw(st.booleans()):
        return draw(st.lists(letters, min_size=1, max_size=max_size))
    period = draw(st.lists(letters, min_size=1, max_size=9))
    tokens = (period * max_size)[: draw(st.integers(1, max_size))]
    for _ in range(draw(st.integers(0, 3))):
        tokens[draw(st.integers(0, len(tokens) - 1))] = draw(letters)
    return tokens


depths = st.integers(1, 14)
factors = st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.7, 4.0, 1e308])
min_probs = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.75, 1.0])


@settings(deadline=None)
@given(histories(), depths, factors, min_probs, st.integers(1, 16), st.data())
def test_speculation_is_that_of_the_definition_however_the_history_arrives(
    tokens: list[int], depth: int, factor: float, min_prob: float, max_tokens: int, data: st.DataObject
) -> None:
    tree = SuffixTree(depth, factor, min_prob)
    while tree.num_tokens < len(tokens):
        known = min(len(tokens), tree.num_tokens + data.draw(st.integers(1, 20)))
        tree.extend(tokens[tree.num_tokens : known])
        tree.check_integrity()
        found = tree.speculate(max_tokens)
        # Equal to the last bit: the same divisions and sums in the same order.
        assert found == speculate_by_definition(tokens[:known], depth, factor, min_prob, max_tokens)


@settings(deadline=None)
@given(histories(max_size=200), st.integers(1, 30))
def test_the_tree_holds_together_after_every_token(tokens: list[int], depth: int) -> None:
    tree = SuffixTree(depth)
    for token in tokens:
        tree.extend([token])
        tree.check_integrity()
    assert tree.num_states <= 2 * len(tokens) + 1


@settings(deadline=None)
@given(st.lists(histories(max_size=25), min_size=2, max_size=4), depths, st.randoms(use_true_random=False))
def test_interleaved_requests_do_not_mix_and_come_back_after_being_forgotten(
    many: list[list[int]], depth: int, rng: random.Random
) -> None:
    proposer = SuffixProposer(depth, 1.0, 0.1, 8)
    requests = [make_request(str(i), tokens[:1]) for i, tokens in enumerate(many)]
    for _ in range(12):
        i = rng.randrange(len(many))
        grown = requests[i].num_tokens
        requests[i].token_ids.extend(many[i][grown : grown + rng.randrange(8)])
        if rng.random() < 0.2:
            proposer.forget(str(i))
        lengths = {str(j): rng.randrange(0, 9) for j in range(len(many)) if rng.random() < 0.7}
        draft = proposer.propose(DraftInputs(requests), Grant(requests, lengths))
        for request in requests:
            max_tokens = lengths.get(request.request_id, 0)
            expected = speculate_by_definition(request.token_ids, depth, 1.0, 0.1, max_tokens).tokens
            assert draft.of(request.request_id).tokens == expected
            assert (request.request_id in draft.by_request) == bool(expected)


def test_the_example_run_with_arctic_inference() -> None:
    tree = SuffixTree(max_depth=64, max_spec_factor=1.0, min_token_prob=0.1)
    tree.extend([1, 2, 3, 4, 1, 2, 3])
    assert tree.speculate(8) == Speculation([4, 1, 2], [0.5, 0.5, 0.5], 1.5)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], list(range(50))])
def test_no_entry_where_nothing_was_seen_before(tokens: list[int]) -> None:
    draft = propose(SuffixProposer(24, 1.0, 0.1, 24), [make_request("a", tokens)], a=24)
    assert draft.by_request == {}


def test_of_next_tokens_as_frequent_the_one_seen_last_is_taken() -> None:
    for tokens, expected in (([1, 7, 1, 8, 1], 8), ([1, 8, 1, 7, 1], 7), ([1, 7, 1, 7, 2, 1, 8, 2, 1], 7)):
        tree = SuffixTree(2)
        tree.extend(tokens)
        assert tree.speculate(1).tokens == [expected]


def test_of_equal_scores_the_longer_context_wins() -> None:
    tree = SuffixTree(24)
    tree.extend([1, 7, 1, 8, 1, 7, 1])  # after 1: 7 twice in four; after 7, 1: 8 once in two
    assert tree.speculate(1) == Speculation([8], [0.5], 0.5)


def test_match_and_draft_together_stay_within_the_depth() -> None:
    for depth in range(1, 20):
        proposer = SuffixProposer(depth, 1.0, 0.0, 100)
        draft = propose(proposer, [make_request("a", [3] * 200)], a=100)
        assert len(draft.of("a")) == depth // 2


def test_source_confidence_and_lengths_are_those_of_the_contract() -> None:
    proposer = SuffixProposer(24, 1.0, 0.1, 5)
    requests = [make_request(name, [1, 2, 3] * 8) for name in "abcd"]
    draft = propose(proposer, requests, a=3, b=0, c=99)
    assert {name: d.tokens for name, d in draft.by_request.items()} == {"a": [1, 2, 3], "c": [1, 2, 3, 1, 2]}
    assert draft.of("a").source == proposer.name == "suffix"
    assert draft.of("a").parents is None
    assert draft.of("a").probs is None
    confidence = draft.of("c").confidence
    assert confidence is not None
    assert len(confidence) == 5
    assert all(0.1 <= c < 1.0 for c in confidence)
    assert confidence == sorted(confidence, reverse=True)
    assert proposer.hidden_taps == ()


def test_constructed_from_the_config() -> None:
    config = MethodConfig(
        method="suffix",
        num_speculative_tokens=9,
        suffix_decoding_max_tree_depth=7,
        suffix_decoding_max_spec_factor=1.5,
        suffix_decoding_min_token_prob=0.2,
        suffix_decoding_max_cached_requests=11,
        suffix_decoding_max_cached_bytes=1 << 16,
    )
    proposer = SuffixProposer.from_config(config)
    assert (proposer.max_tree_depth, proposer.max_spec_factor, proposer.min_token_prob) == (7, 1.5, 0.2)
    assert proposer.num_speculative_tokens == 9
    assert (proposer.cache.max_requests, proposer.cache.max_bytes) == (11, 1 << 16)


def test_the_prompt_is_indexed_along_with_its_chunks_and_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = SuffixProposer(24, 1.0, 0.1, 4)
    request = make_request("a", [1, 2, 3] * 100)
    for start in range(0, 300, 60):
        proposer.observe(Plan([ScheduledRequest(request, start, 60)]), Verdict(), None)
        assert proposer._indexes["a"].num_tokens == start + 60
    assert propose(proposer, [request], a=4).of("a").tokens == [1, 2, 3, 1]

    proposer.forget("a")
    monkeypatch.setattr(history, "MAX_INDEXED_PER_CALL", 100)
    assert [len(propose(proposer, [request], a=4).of("a")) for _ in range(4)] == [0, 0, 4, 4]


HISTORIES: dict[str, Callable[[int, random.Random], list[int]]] = {
    "one token": lambda n, rng: [5] * n,
    "two runs": lambda n, rng: [5] * (n // 2) + [6] * (n - n // 2),
    "few letters": lambda n, rng: [rng.randrange(4) for _ in range(n)],
    "common and rare words": lambda n, rng: [min(int(rng.paretovariate(0.6)), 30_000) for _ in range(n)],
    "no repetition": lambda n, rng: list(range(n)),
}


def count_lines(function: Any, *args: Any) -> int:
    """How many lines of this package `function` executes."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if not frame.f_globals.get("__name__", "").startswith("forerun."):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return lines


def lines_of_proposals(tokens: list[int]) -> list[int]:
    """Lines executed by each of the last 50 proposals, with one new token before each."""
    proposer, request = SuffixProposer(24, 1.0, 0.1, 24), make_request("a", tokens[:-50])
    while "a" not in proposer._indexes or proposer._indexes["a"].num_tokens < request.num_tokens:
        propose(proposer, [request], a=1)
    lines = []
    for token in tokens[-50:]:
        request.token_ids.append(token)
        lines.append(count_lines(lambda: propose(proposer, [request], a=24)))
    return lines


@pytest.mark.parametrize("text", HISTORIES)
def test_work_of_a_proposal_does_not_grow_with_the_history(text: str) -> None:
    short, long = (lines_of_proposals(HISTORIES[text](n, random.Random(1))) for n in (500, 20_000))
    if text in ("few letters", "common and rare words"):
        # Longer suffixes repeat in a longer random text, by the logarithm of its length; `max_depth` is the end of it.
        assert sorted(long)[25] <= 2.5 * sorted(short)[25]
    else:
        assert max(long) <= max(short) + 10
    # The most that 24 states on the way to the root and drafts of up to 12 tokens came to, with room.
    assert max(long) <= 900


@pytest.mark.parametrize("tail", [[6], [6, 5, 5, 6], [5, 6] * 10])
def test_no_single_token_is_expensive_after_a_long_run(tail: list[int]) -> None:
    # A plain suffix automaton visits, and adds a branch to, as many states as the run is long.
    tree = SuffixTree(24)
    tree.extend([5] * 20_000)
    assert tree.num_states <= 25
    for token in tail:
        assert count_lines(tree.extend, [token]) <= 24 * 30
    assert tree.num_states <= 25 + 2 * 24


@pytest.mark.parametrize("depth", [2, 24])
@pytest.mark.parametrize("text", HISTORIES)
def test_bytes_are_told_within_a_factor_of_two_and_given_back(text: str, depth: int) -> None:
    tokens = HISTORIES[text](8000, random.Random(1))
    proposer, request = SuffixProposer(depth, 1.0, 0.1, 5), make_request("a", tokens)
    empty = proposer.state_bytes
    propose(proposer, [], a=5)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        propose(proposer, [request], a=5)
        held = tracemalloc.get_traced_memory()[0] - before
        told = proposer.state_bytes
        proposer.forget("a")
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    small = 16_000  # objects of fixed size, which the figure leaves out, and what other threads of the tests allocate
    assert (held - small) / 2 <= told <= 2 * held + small
    assert held < 500 * len(tokens)
    assert left <= small + held / 20  # the interpreter keeps some freed objects for reuse
    assert proposer.state_bytes <= empty + 1000  # an emptied dict keeps its table
    proposer.forget("never seen")
