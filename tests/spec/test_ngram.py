"""Prompt lookup against its definition, and what it costs."""

from __future__ import annotations

import inspect
import random
import re
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.plan import Grant, Plan, ScheduledRequest
from forerun.request import Request, SamplingParams
from forerun.spec import keys
from forerun.spec.config import MethodConfig
from forerun.spec.proposer import Draft, DraftInputs
from forerun.spec.proposers import history, ngram
from forerun.spec.proposers.ngram import NgramIndex, NgramProposer
from forerun.spec.verifier import Verdict


def make_request(request_id: str, tokens: list[int]) -> Request:
    return Request(request_id, list(tokens), len(tokens), SamplingParams(), seed=0)


def propose(proposer: NgramProposer, requests: list[Request], **lengths: int) -> Draft:
    return proposer.propose(DraftInputs(requests), Grant(requests, lengths))


def by_definition(tokens: list[int], min_n: int, max_n: int, num_drafted: int) -> list[int]:
    """The longest n whose last n tokens occur earlier; what followed their last such occurrence, again and again."""
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        follows = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]]
        if follows:
            grown = list(tokens)
            for i in range(num_drafted):
                grown.append(grown[follows[-1] + i])
            return grown[len(tokens) :]
    return []


@st.composite
def histories(draw: st.DrawFn) -> list[int]:
    """Random over few letters, a period repeated, or a period with faults."""
    letters = st.integers(0, draw(st.sampled_from([0, 1, 2, 4, 100])))
    if draw(st.booleans()):
        return draw(st.lists(letters, min_size=1, max_size=60))
    period = draw(st.lists(letters, min_size=1, max_size=9))
    tokens = (period * 70)[: draw(st.integers(1, 70))]
    for _ in range(draw(st.integers(0, 3))):
        tokens[draw(st.integers(0, len(tokens) - 1))] = draw(letters)
    return tokens


windows = st.tuples(st.integers(1, 10), st.integers(0, 40)).map(lambda w: (w[0], w[0] + w[1]))


@settings(deadline=None)
@given(histories(), windows, st.integers(1, 12), st.data())
def test_drafts_are_those_of_the_definition_however_the_history_arrives(
    tokens: list[int], window: tuple[int, int], num_drafted: int, data: st.DataObject
) -> None:
    proposer = NgramProposer(*window, num_drafted)
    request = make_request("a", [])
    while request.num_tokens < len(tokens):
        num_new = data.draw(st.integers(1, 9))
        request.token_ids.extend(tokens[request.num_tokens : request.num_tokens + num_new])
        draft = propose(proposer, [request], a=num_drafted).of("a")
        assert draft.tokens == by_definition(request.token_ids, *window, num_drafted)


@given(histories(), st.integers(0, 3), st.data())
def test_the_common_end_is_counted_to_the_token(tokens: list[int], letters: int, data: st.DataObject) -> None:
    text = array("i", [token % (letters + 1) for token in tokens] + [0, 0])
    a, b = sorted(data.draw(st.tuples(*2 * [st.integers(1, len(text))])))
    expected = 0
    while expected < a and text[a - 1 - expected] == text[b - 1 - expected]:
        expected += 1
    limit = data.draw(st.integers(0, a))
    known = data.draw(st.integers(0, min(expected, limit)))
    assert ngram._common(text, a, b, known, limit) == min(expected, limit)


@pytest.mark.parametrize("window", [(1, 5), (2, 5), (5, 5), (1, 64), (12, 1024)])
@pytest.mark.parametrize("unit", ["characters", "words"])
def test_the_bound_on_visits_changes_nothing_on_real_text(unit: str, window: tuple[int, int]) -> None:
    source = inspect.getsource(keys) + inspect.getsource(ngram) * 2
    pieces: list[str] = list(source) if unit == "characters" else re.findall(r" ?\w+|\s+|[^\w\s]", source)
    ids: dict[str, int] = {}
    tokens = [ids.setdefault(piece, len(ids)) for piece in pieces]
    text = "".join(map(chr, tokens))
    index = NgramIndex(*window)
    for end in range(11, len(tokens), 11):
        index.extend(tokens, end)
        # The longest tail that is found before, by bisection: with a tail all shorter ones are.
        size, above = 0, min(window[1], end - 1) + 1
        while above - size > 1:
            middle = (size + above) // 2
            size, above = (middle, above) if text.rfind(text[end - middle : end], 0, end - 1) >= 0 else (size, middle)
        found = text.rfind(text[end - size : end], 0, end - 1) + size
        expected = [tokens[found]] if size >= window[0] else []
        assert index.draft(tokens[:end], 1).tokens == expected


@settings(deadline=None)
@given(st.lists(histories(), min_size=2, max_size=4), windows, st.randoms(use_true_random=False))
def test_interleaved_requests_do_not_mix_and_come_back_after_being_forgotten(
    many: list[list[int]], window: tuple[int, int], rng: random.Random
) -> None:
    proposer = NgramProposer(*window, 8)
    requests = [make_request(str(i), tokens[:1]) for i, tokens in enumerate(many)]
    for _ in range(30):
        i = rng.randrange(len(many))
        grown = requests[i].num_tokens
        requests[i].token_ids.extend(many[i][grown : grown + rng.randrange(6)])
        if rng.random() < 0.2:
            proposer.forget(str(i))
        lengths = {str(j): rng.randrange(0, 9) for j in range(len(many)) if rng.random() < 0.7}
        draft = proposer.propose(DraftInputs(requests), Grant(requests, lengths))
        for request in requests:
            expected = by_definition(request.token_ids, *window, lengths.get(request.request_id, 0))
            assert draft.of(request.request_id).tokens == expected
            assert (request.request_id in draft.by_request) == bool(expected)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7, 1, 2, 8, 5, 1, 2, 9, 6, 1, 2], [9, 6, 1, 2]),  # two matches of length 2: the most recent
        ([7, 1, 2, 8, 5, 1, 2, 9, 7, 1, 2], [8, 5, 1, 2]),  # but a longer one first
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),  # the match reaches into the tail: on with the period
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3, 4, 5, 6], []),
        ([1], []),
        ([1, 2], []),
        ([1, 1], []),  # the only pair is the tail itself
        ([], []),
    ],
)
def test_choice_of_the_match(tokens: list[int], expected: list[int]) -> None:
    draft = propose(NgramProposer(2, 3, 4), [make_request("a", tokens)], a=4)
    assert draft.of("a").tokens == expected
    assert ("a" in draft.by_request) == bool(expected)


def test_source_and_lengths_are_those_of_the_contract() -> None:
    proposer = NgramProposer(2, 2, 5)
    requests = [make_request(name, [1, 2, 3] * 4) for name in "abcd"]
    draft = propose(proposer, requests, a=3, b=0, c=99)
    assert {name: len(d) for name, d in draft.by_request.items()} == {"a": 3, "c": 5}
    assert draft.of("a").source == proposer.name == "ngram"
    assert draft.of("a").parents is None
    assert draft.of("a").probs is None
    assert proposer.hidden_taps == ()


def test_a_batch_with_one_match_has_one_entry() -> None:
    requests = [make_request(name, [1, 2, 3, 4, 5, 6]) for name in "abc"]
    requests.append(make_request("d", [1, 2, 3, 4, 5, 1, 2, 3, 4]))
    draft = propose(NgramProposer(4, 6, 5), requests, a=5, b=5, c=5, d=5)
    assert {name: d.tokens for name, d in draft.by_request.items()} == {"d": [5, 1, 2, 3, 4]}


def test_constructed_from_the_config() -> None:
    config = MethodConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=3)
    proposer = NgramProposer.from_config(config)
    limits = (proposer.prompt_lookup_min, proposer.prompt_lookup_max, proposer.num_speculative_tokens)
    assert limits == (2, 3, 4)


def test_the_prompt_is_indexed_along_with_its_chunks() -> None:
    proposer = NgramProposer(2, 3, 4)
    request = make_request("a", [1, 2, 3] * 100)
    for start in range(0, 300, 60):
        proposer.observe(Plan([ScheduledRequest(request, start, 60)]), Verdict(), None)
        assert proposer._indexes["a"].num_tokens == start + 60
    assert propose(proposer, [request], a=4).of("a").tokens == [1, 2, 3, 1]


def test_a_request_that_may_not_draft_is_not_indexed() -> None:
    proposer = NgramProposer(2, 3, 4)
    off, on = make_request("off", [1, 2, 3] * 10), make_request("on", [1, 2, 3] * 10)
    off.max_draft_tokens = 0
    proposer.observe(Plan([ScheduledRequest(off, 0, 30), ScheduledRequest(on, 0, 30)]), Verdict(), None)
    assert propose(proposer, [off, on], off=0, on=4).of("on").tokens == [1, 2, 3, 1]
    assert list(proposer._indexes) == ["on"]


def test_a_long_history_is_indexed_over_several_steps_and_drafts_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_INDEXED_PER_CALL", 100)
    proposer = NgramProposer(2, 3, 4)
    requests = [make_request("a", [1, 2, 3] * 100), make_request("b", [4, 5] * 10)]
    with_draft = [sorted(propose(proposer, requests, a=4, b=4).by_request) for _ in range(4)]
    assert with_draft == [[], [], ["a"], ["a", "b"]]
    assert propose(proposer, requests, a=4).of("a").tokens == [1, 2, 3, 1]


HISTORIES: dict[str, Callable[[int, random.Random], list[int]]] = {
    "one token": lambda n, rng: [5] * n,
    "few letters": lambda n, rng: [rng.randrange(4) for _ in range(n)],
    "common and rare words": lambda n, rng: [min(int(rng.paretovariate(0.6)), 30_000) for _ in range(n)],
    "no repetition": lambda n, rng: list(range(n)),
}


def block(n: int, rng: random.Random) -> list[int]:
    return ([rng.randrange(1000) for _ in range(300)] * (n // 300 + 1))[:n]


def zigzag(n: int, rng: random.Random) -> list[int]:
    """Each context of the common token lies between all earlier ones."""
    return [token for i in range(n // 40 + 1) for token in [30_000 - i if i % 2 else i, *[20_000] * 39]][:n]


def rising(n: int, rng: random.Random) -> list[int]:
    """Longer and longer runs of one token: every length of run has contexts of its own."""
    return [token for k in range(1, n) for token in [*[5] * k, 6] if k * k < 2 * n + 100][:n]


HOSTILE: dict[str, Callable[[int, random.Random], list[int]]] = {
    "one token": HISTORIES["one token"],
    "few letters": HISTORIES["few letters"],
    "block": block,
    "zigzag": zigzag,
    "rising": rising,
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


@pytest.mark.parametrize("window", [(2, 5), (1, 1024)])
@pytest.mark.parametrize("text", HISTORIES)
def test_work_of_a_proposal_does_not_grow_with_the_history(text: str, window: tuple[int, int]) -> None:
    most = []
    for size in (500, 20_000):
        tokens = HISTORIES[text](size, random.Random(1))
        proposer, request = NgramProposer(*window, 5), make_request("a", tokens[:-50])
        while "a" not in proposer._indexes or proposer._indexes["a"].num_tokens < request.num_tokens:
            propose(proposer, [request], a=5)
        most.append(0)
        for token in tokens[-50:]:
            request.token_ids.append(token)
            most[-1] = max(most[-1], count_lines(lambda p=proposer, r=request: propose(p, [r], a=5)))
    # A path of logarithmic length, a dozen lines a place, and every token drafted one by one.
    assert max(most) <= 700
    assert most[1] <= 1.7 * most[0] + 40


@pytest.mark.parametrize("max_n", [5, 64, 1024])
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_costs_bounded_work_and_memory_a_token_whatever_the_window(text: str, max_n: int) -> None:
    tokens = HOSTILE[text](2400, random.Random(1))
    index = NgramIndex(1, max_n)
    most = total = 0
    for end in range(1, len(tokens) + 1):
        lines = count_lines(index.extend, tokens, end)
        most, total = max(most, lines), total + lines
    assert most <= 24 * ngram.MAX_VISITS  # a dozen lines a place, and those of the comparison
    assert total <= 900 * len(tokens)
    tracemalloc.start()
    try:
        index = NgramIndex(1, max_n)
        index.extend(tokens, len(tokens))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= 60 * len(tokens)


@pytest.mark.parametrize("window", [(5, 5), (2, 5), (1, 16), (1024, 1024)])
@pytest.mark.parametrize("text", HISTORIES)
def test_bytes_are_told_within_a_factor_of_two_and_given_back(text: str, window: tuple[int, int]) -> None:
    tokens = HISTORIES[text](8000, random.Random(1))
    proposer, request = NgramProposer(*window, 5), make_request("a", tokens)
    empty = proposer.state_bytes
    propose(proposer, [], a=5)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        propose(proposer, [request], a=5)
        held = tracemalloc.get_traced_memory()[0] - before
        told = proposer.state_bytes
        proposer.forget("a")
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    small = 2000  # objects of fixed size, which the figure leaves out
    assert (held - small) / 2 <= told <= 2 * held + small
    assert held < 300 * len(tokens)
    assert left <= small + held / 20  # the interpreter keeps some freed objects for reuse
    assert proposer.state_bytes <= empty + 1000  # an emptied dict keeps its table
    proposer.forget("never seen")
