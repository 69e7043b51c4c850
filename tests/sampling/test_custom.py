"""Registered logits processors: what they are given, and what becomes of a request whose processor fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from forerun import LLM
from forerun.errors import ConfigError, RequestError
from forerun.request import FinishReason, SamplingParams
from forerun.sampling.processors.custom import RowProcessor
from tests.sampling.rows import params
from tests.tiny_engine import NGRAM, make_engine, prompts, run


class NotTwice(RowProcessor):
    """Forbids every token that stands among the last `window` ones, drafted ones included."""

    def asks(self, extra_args: Mapping[str, Any]) -> bool:
        if not isinstance(extra_args.get("window", 1), int):
            raise ValueError("window must be a number of tokens")
        return "window" in extra_args

    def process(self, extra_args: Mapping[str, Any], token_ids: Sequence[int], logits: Tensor) -> Tensor:
        logits[list(token_ids[-extra_args["window"] :])] = float("-inf")
        return logits


class Broken(RowProcessor):
    """Fails, gives NaN, or forbids everything, after three tokens."""

    def asks(self, extra_args: Mapping[str, Any]) -> bool:
        return "fault" in extra_args

    def process(self, extra_args: Mapping[str, Any], token_ids: Sequence[int], logits: Tensor) -> Tensor:
        if len(token_ids) < extra_args["after"]:
            return logits
        if extra_args["fault"] == "raise":
            raise KeyError("no such luck")
        return logits * float("nan" if extra_args["fault"] == "nan" else "-inf") * 0 + float(
            extra_args["fault"] != "nan"
        )


NAMES = (f"{__name__}:NotTwice", f"{__name__}:Broken")


def case(**extra_args: Any) -> SamplingParams:
    return params(max_tokens=20, ignore_eos=True, extra_args=extra_args or None)


def test_a_processor_sees_all_tokens_before_a_row_drafted_ones_included(tiny_model: Path) -> None:
    work = [(prompt, case(window=window)) for prompt in prompts(4) for window in (1, 5, 30)]
    work += [(prompt, case()) for prompt in prompts(2)]
    plain, drafted = (run(make_engine(tiny_model, spec, logits_processors=NAMES), work) for spec in (None, NGRAM))
    assert [r.key for r in plain] == [r.key for r in drafted]
    for (prompt, asked), result in zip(work, plain, strict=True):
        if asked.extra_args is not None:
            tokens, window = list(prompt) + result.token_ids, asked.extra_args["window"]
            for place in range(len(prompt), len(tokens)):
                assert tokens[place] not in tokens[max(0, place - window) : place]


@pytest.mark.parametrize(("fault", "said"), [("raise", "Broken failed: KeyError"), ("nan", "Broken gave NaN")])
def test_a_processor_that_fails_ends_its_request_and_no_other(tiny_model: Path, fault: str, said: str) -> None:
    prompt = prompts(1)[0]
    engine = make_engine(tiny_model, NGRAM, logits_processors=(NotTwice, Broken))
    bad, good = run(engine, [(prompt, case(fault=fault, after=len(prompt) + 3)), (prompt, case())])
    assert bad.last.finish_reason is FinishReason.ERROR
    assert said in (bad.last.error or "")
    assert len(bad.token_ids) == 3
    assert len(good.token_ids) == 20


def test_arguments_that_nobody_takes_are_refused(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, logits_processors=NAMES)
    for extra_args, message in (({"wndow": 3}, "'wndow'"), ({"window": "3"}, "window must be a number")):
        with pytest.raises(RequestError, match=message) as error:
            run(engine, [([5], case(**extra_args))])
        assert error.value.param == "extra_args"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.sampling.test_custom", "module:Class"),
        ("tests.nowhere:Class", "cannot be imported"),
        ("tests.sampling.test_custom:Nobody", "cannot be imported"),
        ("tests.sampling.test_custom:case", "no class derived"),
    ],
)
def test_a_class_that_is_none_stops_the_start(tiny_model: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), logits_processors=[name])
