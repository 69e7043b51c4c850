"""`reasoning_parser`: what is asked of the form holds from the end of the reasoning on, wherever that lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun.engine.engine import Engine
from forerun.errors import RequestError
from forerun.request import FinishReason, Request, SamplingParams
from forerun.sampling.processors import LogitsProcessor, LogitsProcessors
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer
from tests.structured.forms import CHOICES, FORMS
from tests.tiny_engine import Result, make_engine, run
from tests.tiny_tokenizer import IM_END

TAGS = "tags:<r>,</r>"
THOUGHT = "a guess</r>"


class Steered(LogitsProcessor):
    """The target says a text first, and then what it likes."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def start(self, request: Request) -> bool:
        return True

    def apply(self, logits: Any, rows: Any, draft: Any) -> None:
        for r in rows:
            for row in range(r.num_rows):
                position = r.position + row
                if position < len(self.token_ids):
                    logits[r.first_row + row, self.token_ids[position]] = 1e4


def steer(engine: Engine, text: str) -> Engine:
    first = Steered(engine.outputs.tokenizer.encode(text))
    engine.processors = LogitsProcessors([first, *engine.processors._processors])
    return engine


def one(engine: Engine, form: dict[str, Any], prompt: str = "the server", **params: Any) -> Result:
    given = {"temperature": 0, "max_tokens": 60, "seed": 1, "structured_outputs": form} | params
    return run(engine, [(engine.outputs.tokenizer.encode(prompt), SamplingParams(**given))])[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_form_begins_where_reasoning_ends(tiny_model: Path, form: str) -> None:
    engine = steer(make_engine(tiny_model, reasoning_parser=TAGS), THOUGHT)
    asked, valid = FORMS[form]
    text = one(engine, asked, max_tokens=120).text
    assert text.startswith(THOUGHT)
    assert valid(text.removeprefix(THOUGHT))


@pytest.mark.parametrize("length", [1, 3, 8, 30])
def test_it_may_end_inside_of_a_draft(tiny_model: Path, length: int) -> None:
    """Right drafts across the tag all stand; what the grammar refuses after it is cut, what comes before it is not."""
    form = {"choice": CHOICES}
    plain = one(steer(make_engine(tiny_model, reasoning_parser=TAGS), THOUGHT), form)

    def script(request: Request, most: int) -> RequestDraft:
        start = request.num_output_tokens
        return RequestDraft(plain.token_ids[start : start + most], "scripted")

    drafting = make_engine(tiny_model, ScriptedProposer(script), length=length, reasoning_parser=TAGS)
    result = one(steer(drafting, THOUGHT), form)
    assert result.key == plain.key
    spec = result.last.metrics.speculative_decoding
    assert spec is None or spec["num_accepted_draft_tokens"] == spec["num_draft_tokens"]
    assert sum(result.drafted) >= (len(plain.token_ids) - 2) * length // (length + 1)

    wrong = make_engine(
        tiny_model,
        ScriptedProposer(lambda r, most: RequestDraft([*script(r, most).tokens[:-1], 65][:most], "scripted")),
        length=length,
        reasoning_parser=TAGS,
    )
    assert one(steer(wrong, THOUGHT), form).key == plain.key


def test_a_prompt_that_has_closed_it_has_none(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, reasoning_parser=TAGS)
    assert one(engine, {"choice": CHOICES}, "x<r></r>\n").text in CHOICES
    assert one(engine, {"choice": CHOICES}, "x</r>y").text not in CHOICES


def test_reasoning_that_never_ends_is_free(tiny_model: Path) -> None:
    free, asked = (make_engine(tiny_model, reasoning_parser=TAGS) for _ in range(2))
    params: dict[str, Any] = {"max_tokens": 20}
    assert one(asked, {"choice": CHOICES}, **params).token_ids == one(free, None, **params).token_ids  # type: ignore[arg-type]


class Bans(LogitsProcessor):
    """Leaves the end token out, as min_tokens does."""

    def start(self, request: Request) -> bool:
        return True

    def apply(self, logits: Any, rows: Any, draft: Any) -> None:
        for r in rows:
            logits[r.first_row : r.first_row + r.num_rows, IM_END] = float("-inf")


@pytest.mark.parametrize("spec", [None, {"method": "grammar"}])
def test_parameters_that_contradict_the_form_end_the_request_and_say_so(tiny_model: Path, spec: Any) -> None:
    engine = make_engine(tiny_model, spec)
    engine.processors = LogitsProcessors([Bans(), *engine.processors._processors])
    last = one(engine, {"choice": ["server"]}).last
    assert last.finish_reason is FinishReason.ERROR
    assert "contradicts the other parameters" in (last.error or "")
    assert (last.error_param, last.bad_request) == ("structured_outputs", True)
    assert not engine.has_work


def test_a_name_that_is_no_parser_is_refused(tiny_model: Path) -> None:
    from forerun.errors import ConfigError

    with pytest.raises(ConfigError, match="reasoning-parser"):
        make_engine(tiny_model, reasoning_parser="qwen9")


def test_a_bad_grammar_is_refused_by_the_engine_too(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with pytest.raises(RequestError, match="regex"):
        one(engine, {"regex": "("})
    assert not engine.has_work
