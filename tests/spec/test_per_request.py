"""What a request's own `speculative_config` asks for, and the line that refuses the rest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.messages import NewRequest
from forerun.errors import RequestError
from forerun.request import SamplingParams
from forerun.spec.per_request import RequestSpeculation, request_speculation

LOADED, K = ("suffix", "ngram", "draft_model"), 8


@pytest.mark.parametrize(
    ("asked", "max_draft_tokens", "draft_methods"),
    [
        (None, None, None),
        ({}, None, None),
        ({"method": None, "num_speculative_tokens": None}, None, None),
        ({"num_speculative_tokens": 0}, 0, None),
        ({"num_speculative_tokens": 3}, 3, None),
        ({"num_speculative_tokens": 8}, 8, None),
        ({"method": "ngram"}, None, ("ngram",)),
        ({"method": ["ngram"]}, None, ("ngram",)),
        ({"method": ["draft_model", "suffix", "suffix"]}, None, ("suffix", "draft_model")),  # in the server's order
        ({"method": "ngram_gpu", "num_speculative_tokens": 2}, 2, ("ngram",)),
        ({"method": "none"}, 0, None),
        ({"method": ["none"]}, 0, None),
        ({"method": "none", "num_speculative_tokens": 0}, 0, None),
    ],
)
def test_a_request_lowers_k_chooses_methods_or_switches_drafting_off(
    asked: Any, max_draft_tokens: int | None, draft_methods: tuple[str, ...] | None
) -> None:
    assert request_speculation(asked, LOADED, K) == RequestSpeculation(max_draft_tokens, draft_methods)


@pytest.mark.parametrize(
    ("asked", "param", "parts"),
    [
        ({"num_speculative_tokens": 9}, "num_speculative_tokens", ["0 to 8", "got 9"]),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", ["0 to 8", "got -1"]),
        ({"num_speculative_tokens": True}, "num_speculative_tokens", ["an integer", "got true"]),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens", ["an integer", "got 2.0"]),
        ({"num_speculative_tokens": "2"}, "num_speculative_tokens", ["an integer", 'got "2"']),
        ({"num_speculative_tokens": 10**5000}, "num_speculative_tokens", ["too large to show"]),
        ({"method": "eagle3"}, "method", ['"eagle3" is not loaded', '"suffix", "ngram", "draft_model"']),
        ({"method": "sufix"}, "method", ['"sufix" is not loaded', 'did you mean "suffix"?']),
        ({"method": ["suffix", "ngram_mod"]}, "method", ['"ngram_mod" is not loaded']),
        ({"method": []}, "method", ["got []"]),
        ({"method": 5}, "method", ["got 5"]),
        ({"method": ["suffix", 5]}, "method", ['got ["suffix", 5]']),
        ({"method": ["none", "suffix"]}, "method", ['"none" excludes']),
        ({"method": "none", "num_speculative_tokens": 4}, "num_speculative_tokens", ["contradicts", "none"]),
        ({"num_speculative_token": 4}, "num_speculative_token", ['did you mean "num_speculative_tokens"?']),
        ({"model": "x"}, "model", ['unknown key "model"', '"num_speculative_tokens", "method"']),
    ],
)
def test_a_bad_wish_is_refused_by_name(asked: dict[str, Any], param: str, parts: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        request_speculation(asked, LOADED, K)
    message = str(caught.value)
    assert message.startswith("speculative_config: ")
    assert message.isprintable()
    assert caught.value.param == f"speculative_config.{param}"
    for part in parts:
        assert part in message


@pytest.mark.parametrize("asked", [{}, {"num_speculative_tokens": 0}, {"method": "none"}])
def test_without_speculation_it_may_be_switched_off(asked: dict[str, Any]) -> None:
    assert not request_speculation(asked, (), 0).max_draft_tokens


@pytest.mark.parametrize("asked", [{"num_speculative_tokens": 1}, {"method": "ngram"}])
def test_without_speculation_drafts_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="runs without speculation"):
        request_speculation(asked, (), 0)


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.text(max_size=8))
KEYS = st.sampled_from(["num_speculative_tokens", "method", "rejection_sample_method"]) | st.text(max_size=8)


@given(asked=st.dictionaries(KEYS, JSON | st.sampled_from([*LOADED, "none"]) | st.integers(0, 9), max_size=3))
def test_any_object_is_taken_within_bounds_or_refused_in_one_line(asked: dict[str, Any]) -> None:
    try:
        found = request_speculation(asked, LOADED, K)
    except RequestError as error:
        refused = str(error)
    else:
        assert found.max_draft_tokens is None or 0 <= found.max_draft_tokens <= K
        assert found.draft_methods is None or set(found.draft_methods) <= set(LOADED)
        return
    assert refused.isprintable()


@pytest.mark.parametrize(
    ("own", "available"),
    [
        ("match", ["match", "standard"]),
        ("standard", ["match", "standard"]),
        ("block", ["match", "standard", "block"]),
        ("fly", ["match", "standard", "fly"]),
        ("synthetic", ["match", "standard", "synthetic"]),
    ],
)
def test_a_request_may_ask_for_a_stricter_rule_never_for_a_looser_one(own: str, available: list[str]) -> None:
    for rule in ("match", "standard", "block", "fly", "synthetic", "none", "", 5, ["match"]):
        asked = {"rejection_sample_method": rule}
        if rule in available:
            assert request_speculation(asked, LOADED, K, own) == RequestSpeculation(rejection_sample_method=str(rule))
        else:
            with pytest.raises(RequestError, match=f'own is "{own}"; a request may give') as caught:
                request_speculation(asked, LOADED, K, own)
            assert caught.value.param == "speculative_config.rejection_sample_method"
    assert request_speculation({"rejection_sample_method": "match"}, (), 0).rejection_sample_method == "match"
    off = request_speculation({"rejection_sample_method": "match", "method": "none"}, LOADED, K, own)
    assert off == RequestSpeculation(0, None, "match")


def test_sampling_params_take_an_object_and_cross_to_the_core() -> None:
    asked = {"method": ["suffix"], "num_speculative_tokens": 2}
    params = SamplingParams(speculative_config=asked)
    assert params != SamplingParams()
    assert {params: 1}[SamplingParams(speculative_config=dict(asked))] == 1
    new = NewRequest("r", [1], params, 0, max_draft_tokens=2, draft_methods=("suffix",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=NewRequest) == new
    with pytest.raises(RequestError, match="speculative_config must be an object, got 5"):
        SamplingParams(speculative_config=5)  # type: ignore[arg-type]
