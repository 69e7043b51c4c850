"""`SamplingParams`: what it takes, what it refuses by name, and its way through a message."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from forerun.errors import RequestError
from forerun.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("presence_penalty", 2.5, "[-2, 2]"),
        ("frequency_penalty", float("nan"), "[-2, 2]"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", float("inf"), "above 0"),
        ("min_p", -0.1, "[0, 1]"),
        ("temperature", 101, "[0, 100]"),
        ("logit_bias", {5: 100.5}, "[-100, 100]"),
        ("logit_bias", {5: float("nan")}, "[-100, 100]"),
        ("logit_bias", {"five": 1}, "token ids for keys"),
        ("logit_bias", [5], "an object"),
        ("allowed_token_ids", [], "not be empty"),
        ("allowed_token_ids", "5", "list of token ids"),
        ("bad_words", [" "], "bad_words[0]"),
        ("min_tokens", 17, "at most max_tokens"),
        ("min_tokens", -1, "[0, "),
        ("best_of", 129, "[1, 128]"),
        ("prompt_logprobs", 21, "[0, 20]"),
        ("logprob_token_ids", range(129), "at most 128"),
        ("truncate_prompt_tokens", 0, "at least 1"),
        ("truncation_side", "both", "'left' or 'right'"),
        ("thinking_token_budget", -2, "[-1, "),
        ("extra_args", [1], "an object"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any, said: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
    assert field in str(error.value)
    assert said in str(error.value)


def test_lists_texts_numpys_numbers_and_jsons_keys_are_taken() -> None:
    params = SamplingParams(
        stop="end",
        bad_words=["a"],  # type: ignore[arg-type]
        allowed_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={"7": np.float32(2), np.int64(8): -1},  # type: ignore[dict-item]
        truncation_side="right",  # type: ignore[arg-type]
        thinking_token_budget=-1,
    )
    assert params.stop == ("end",)
    assert params.bad_words == ("a",)
    assert params.allowed_token_ids == (3, 4)
    assert params.logit_bias == {7: 2.0, 8: -1.0}
    assert params.thinking_token_budget is None
    assert SamplingParams(logit_bias={}).logit_bias is None
    hash(params)


def test_nothing_is_lost_in_a_message() -> None:
    params = SamplingParams(
        logit_bias={7: 2.0},
        allowed_token_ids=(7,),
        bad_words=("a", "b"),
        truncation_side="right",  # type: ignore[arg-type]
        extra_args={"a": [1, "b"]},
        best_of=4,
        prompt_logprobs=2,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"])
def test_ids_outside_of_the_vocabulary_are_refused(field: str) -> None:
    value: Any = {50: 1.0} if field == "logit_bias" else (3, 50)
    SamplingParams(**{field: value}).check_vocabulary(51)
    with pytest.raises(RequestError, match=r"50 is not in the vocabulary \[0, 50\)") as error:
        SamplingParams(**{field: value}).check_vocabulary(50)
    assert error.value.param == field
