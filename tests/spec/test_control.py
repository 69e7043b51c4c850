"""How many tokens each request may draft: fixed, or by the number of decoding requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.request import Request, SamplingParams
from forerun.spec.batch_table import describe
from forerun.spec.config import SpeculativeConfig
from forerun.spec.control import STEPS_TO_RISE, FixedLength, LengthByBatchSize, make_control

TABLE = SpeculativeConfig.parse(
    {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 4, 5], [8, 16, 2], [32, 64, 0]],
    }
).num_speculative_tokens_per_batch_size


def request(name: str, *, decoding: bool = True, most: int | None = None) -> Request:
    made = Request(name, [1, 2, 3], 3, SamplingParams(), 0, max_draft_tokens=most)
    made.caches[0].num_tokens = 2 if decoding else 1
    return made


def lengths(control: LengthByBatchSize, num_decoding: int, num_prefilling: int = 0) -> list[int]:
    """K of each request of a step: decoding ones first."""
    requests = [request(f"d{i}") for i in range(num_decoding)]
    requests += [request(f"p{i}", decoding=False) for i in range(num_prefilling)]
    return list(control.lengths(requests).values())


def ks(control: LengthByBatchSize, counts: Sequence[int]) -> list[int]:
    return [control.step(count) for count in counts]


def test_a_request_is_decoding_when_one_known_token_is_left_to_compute() -> None:
    made = request("r")
    assert made.decoding
    for computed in (0, 1, 3):
        made.caches[0].num_tokens = computed
        assert not made.decoding


def test_a_fixed_length_holds_for_all_that_run_and_no_more_than_each_asks_for() -> None:
    requests = [request("a"), request("b", most=2), request("c", most=0), request("d", most=9)]
    requests.append(request("e", decoding=False))
    assert FixedLength(4).lengths(requests) == {"a": 4, "b": 2, "c": 0, "d": 4, "e": 4}


@pytest.mark.parametrize(
    ("num_decoding", "k"), [(0, 5), (1, 5), (4, 5), (7, 5), (8, 2), (16, 2), (20, 2), (31, 2), (32, 0), (100, 0)]
)
def test_gaps_keep_the_k_before_them_and_the_last_k_holds_beyond(num_decoding: int, k: int) -> None:
    """C28."""
    assert LengthByBatchSize(TABLE).allowed(num_decoding) == k


def test_only_decoding_requests_are_counted() -> None:
    """C28: prompts under way change nothing, and get K too, for a proposer that fills its cache along."""
    control = LengthByBatchSize(TABLE)
    assert lengths(control, 7, 100) == [5] * 107
    assert lengths(control, 8, 0) == [2] * 8


def test_a_request_may_ask_for_less_than_the_table_gives() -> None:
    requests = [request("a"), request("b", most=1), request("c", most=0)]
    assert LengthByBatchSize(TABLE).lengths(requests) == {"a": 5, "b": 1, "c": 0}


def test_k_falls_at_once_and_rises_after_as_many_steps_as_it_says() -> None:
    control = LengthByBatchSize(TABLE)
    assert ks(control, [7, 8, 32]) == [5, 2, 0]
    assert ks(control, [31] * (STEPS_TO_RISE - 1)) == [0] * (STEPS_TO_RISE - 1)
    assert ks(control, [31, 31]) == [2, 2]
    assert ks(control, [1] * STEPS_TO_RISE) == [2] * (STEPS_TO_RISE - 1) + [5]


def test_k_does_not_flap_where_the_batch_moves_around_an_edge() -> None:
    """A table alone would change K in every one of these steps."""
    control = LengthByBatchSize(TABLE)
    assert ks(control, [8, 7] * 50) == [2] * 100
    assert ks(control, [7] * (STEPS_TO_RISE - 2)) == [2] * (STEPS_TO_RISE - 2)  # the last of the pairs counts
    assert control.step(7) == 5


def test_it_rises_to_the_least_that_was_allowed_meanwhile() -> None:
    control = LengthByBatchSize(((1, 1, 5), (2, 2, 3), (3, 3, 0)))
    assert ks(control, [3, 1, 1, 2, *[1] * (STEPS_TO_RISE - 4)]) == [0] * STEPS_TO_RISE
    assert control.step(1) == 3
    assert ks(control, [1] * STEPS_TO_RISE) == [3] * (STEPS_TO_RISE - 1) + [5]


@given(counts=st.lists(st.integers(0, 40), max_size=200))
def test_it_never_drafts_more_than_the_table_allows_and_rises_at_most_once_in_as_many_steps(counts: list[int]) -> None:
    control = LengthByBatchSize(TABLE)
    given = ks(control, counts)
    assert all(k <= control.allowed(count) for k, count in zip(given, counts, strict=True))
    rises = [i for i in range(1, len(given)) if given[i] > given[i - 1]]
    assert all(later - earlier >= STEPS_TO_RISE for earlier, later in itertools.pairwise(rises))


def test_a_configuration_makes_its_control() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 5}
    fixed = make_control(SpeculativeConfig.parse(ngram))
    assert fixed.lengths([request("a")]) == {"a": 5}
    assert make_control(None).lengths([request("a")]) == {"a": 0}
    several = make_control(
        SpeculativeConfig.parse({"method": [ngram, {"method": "suffix", "num_speculative_tokens": 9}]})
    )
    assert several.lengths([request("a")]) == {"a": 9}
    by_size = make_control(SpeculativeConfig.parse(ngram | {"num_speculative_tokens_per_batch_size": [[1, 1, 2]]}))
    assert by_size.lengths([request("a")]) == {"a": 2}


def test_the_table_in_words() -> None:
    assert describe(TABLE) == "1-7: 5, 8-31: 2, 32 and more: 0"
    assert describe(((1, 1, 3), (2, 9, 1))) == "1: 3, 2 and more: 1"
