"""Grammars from anybody: refused with the reason, and in a bounded time, whatever they are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.models.tokenizer import load_tokenizer
from forerun.request import SamplingParams
from forerun.structured.trial import GrammarTrial
from tests.structured.forms import FORMS


@pytest.fixture(scope="module")
def trial(tiny_model: Path) -> Iterator[GrammarTrial]:
    trial = GrammarTrial(load_tokenizer(str(tiny_model)))
    yield trial
    trial.close()


def refusal(trial: GrammarTrial, form: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        trial.check(form)
    assert caught.value.param == f"structured_outputs.{next(iter(form))}"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tag(**format: Any) -> dict[str, Any]:
    return {"structural_tag": {"format": format}}


FORCED = {"null": ({"json": {"type": "null"}}, None), "one_choice": ({"choice": ["7391505"]}, None)}


@pytest.mark.parametrize("form", FORMS | FORCED)
def test_what_is_right_passes(trial: GrammarTrial, form: str) -> None:
    trial.check((FORMS | FORCED)[form][0])


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": "root ::= ("}, "GBNF"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"dependentSchemas": {"a": {}}}}, "dependentSchemas"),
        (tag(type="tagg"), "'tagg' is not served"),
        (tag(type="tag", begin="<a>", content={"type": "any_text"}), "'end' is missing"),
        (tag(type="triggered_tags", triggers=["<a"], tags=[{"begin": "<b>"}]), "none of the triggers"),
        ({"structural_tag": {"structures": []}}, "triggers"),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason(trial: GrammarTrial, form: dict[str, Any], part: str) -> None:
    assert part in refusal(trial, form)


def test_ctrl_c_in_a_terminal_does_not_reach_the_process(trial: GrammarTrial) -> None:
    trial.check({"json_object": True})
    assert trial._process is not None
    assert os.getpgid(trial._process.pid) != os.getpgid(0)


def test_the_process_ends_with_the_one_that_asks(tiny_model: Path) -> None:
    trial = GrammarTrial(load_tokenizer(str(tiny_model)))
    trial.check({"json_object": True})
    process = trial._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as the system does where this process is killed
    assert process.wait(20) == 0
    trial.close()


HOSTILE: dict[str, dict[str, Any]] = {
    "intersection": {"json": {"allOf": [{"type": "string", "pattern": f"a{{{i},}}b{{0,{i}}}"} for i in range(1, 40)]}},
    "wide": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(4000)}}},
    "alternatives": {"json": {"anyOf": [{"properties": {f"k{i}": {"const": i}}} for i in range(4000)]}},
    "nested": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "never": {"grammar": "start: start"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_take_forever_is_refused_in_time(trial: GrammarTrial, name: str) -> None:
    trial.check({"json_object": True})  # the process runs
    started = time.monotonic()
    refusal(trial, HOSTILE[name])
    assert time.monotonic() - started < 20  # by itself the first takes minutes; processor time is bounded at 1 s
    known = time.monotonic()
    refusal(trial, HOSTILE[name])
    assert time.monotonic() - known < 2
    trial.check({"regex": f"{name}+"})


def test_a_bad_grammar_ends_its_call_and_leaves_nothing(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20)
    good = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"choice": ["server", "target"]})
    bad = SamplingParams(structured_outputs={"regex": "("})
    with pytest.raises(RequestError):
        llm.generate([[5, 60]] * 2, [good, bad])
    assert not llm.engine.has_work
    assert llm.generate([5, 60], good)[0].outputs[0].text in ("server", "target")
