"""Every kind of form under every method: valid text, and the text that is there without speculation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.request import FinishReason, SamplingParams
from forerun.structured.processor import StructuredProcessor
from tests.methods import METHODS, WITH_FORMS, DraftModels
from tests.structured.forms import FORMS
from tests.tiny_engine import Result, Work, finish, make_engine, prompts, run
from tests.tiny_tokenizer import IM_END

MAX_TOKENS = 100


def work() -> Work:
    """Each form, greedy and drawn; between them requests of any text."""
    pairs = []
    for place, (prompt, (form, _)) in enumerate(zip(prompts(len(FORMS), seed=4), FORMS.values(), strict=True)):
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                temperature=temperature, seed=place, max_tokens=MAX_TOKENS, structured_outputs=form, logprobs=1
            )
            pairs.append((prompt, params))
        pairs.append((prompt[::-1], SamplingParams(temperature=place % 2, seed=place, max_tokens=20)))
    return pairs


def check_valid(results: list[Result]) -> None:
    for place, (_, valid) in enumerate(FORMS.values()):
        for result in results[3 * place : 3 * place + 2]:
            assert result.last.finish_reason is FinishReason.STOP, result.text
            assert valid(result.text)
            assert result.token_ids[-1] == IM_END


def check_idle(engine: Engine) -> None:
    (structured,) = (p for p in engine.processors._processors if isinstance(p, StructuredProcessor))
    assert not structured._guides


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[Result]:
    """Each request alone, without speculation."""
    results = run(make_engine(tiny_model), work(), together=False)
    check_valid(results)
    return results


@pytest.mark.parametrize("method", WITH_FORMS)
def test_text_is_valid_and_that_of_plain_decoding(
    tiny_model: Path, draft_models: DraftModels, reference: list[Result], method: str
) -> None:
    engine = make_engine(tiny_model, WITH_FORMS[method](draft_models))
    results = run(engine, work())
    assert [r.key for r in results] == [r.key for r in reference]
    assert [r.logprobs for r in results] == [r.logprobs for r in reference]
    assert engine.stats().spec.num_draft_tokens > 0
    check_idle(engine)


def test_text_drawn_by_the_standard_rule_is_valid(tiny_model: Path, draft_models: DraftModels) -> None:
    spec = METHODS["draft_model"](draft_models) | {"draft_sample_method": "probabilistic"}
    engine = make_engine(tiny_model, spec)
    check_valid(run(engine, work()))
    assert engine.stats().spec.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3_tree", "grammar_then_ngram"])
def test_preemption_chunks_and_aborts_leave_no_trace(
    tiny_model: Path, draft_models: DraftModels, reference: list[Result], method: str
) -> None:
    memory = {"kv_cache_memory_bytes": 96 << 10, "max_model_len": 180}
    if method == "eagle3_tree":  # a head's rows lie beside
        memory["kv_cache_memory_bytes"] = 500 << 10
    engine = make_engine(tiny_model, WITH_FORMS[method](draft_models), max_num_batched_tokens=24, **memory)
    rng, results = random.Random(3), {}
    for place, (prompt, params) in enumerate(work()):
        seed = params.seed if params.seed is not None else place
        results[f"r{place}"], results[f"gone{place}"] = Result(), Result()
        engine.add_request(NewRequest(f"r{place}", list(prompt), params, seed))
        engine.add_request(NewRequest(f"gone{place}", list(prompt[::-1]), params, seed))
        for _ in range(rng.randint(0, 3)):
            for output in engine.step().outputs:
                results[output.request_id].add(output)
        engine.abort_requests([f"gone{place}"])
    finish(engine, results)
    assert [results[f"r{place}"].key for place in range(len(reference))] == [r.key for r in reference]
    assert engine.stats().num_preemptions > 0
    check_idle(engine)


def one(engine: Engine, form: dict[str, Any], **params: Any) -> Result:
    given = {"temperature": 0, "max_tokens": MAX_TOKENS, "seed": 1} | params
    return run(engine, [([5, 60, 70], SamplingParams(structured_outputs=form, **given))])[0]


def test_all_n_answers_are_valid_and_differ(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, {"method": "grammar"})
    results = {f"c{choice}": Result() for choice in range(4)}
    params = SamplingParams(n=4, temperature=1, seed=2, max_tokens=MAX_TOKENS, structured_outputs=FORMS["json"][0])
    for choice in range(4):
        engine.add_request(NewRequest(f"c{choice}", [5, 60, 70], params, 2, choice=choice))
    finish(engine, results)
    texts = {result.text for result in results.values()}
    assert all(FORMS["json"][1](text) for text in texts)
    assert len(texts) == 4


def test_ignore_eos_goes_on_as_far_as_the_grammar_does(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    result = one(engine, {"regex": "a{2,9}"}, ignore_eos=True)
    assert result.text == "a" * 9
    assert result.last.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_the_text_before_the_grammar_does(tiny_model: Path) -> None:
    result = one(make_engine(tiny_model, {"method": "grammar"}), FORMS["structural_tag"][0], stop=("add>",))
    assert (result.text, result.last.stop_reason) == ("<call=", "add>")


def test_max_tokens_ends_it_too(tiny_model: Path) -> None:
    result = one(make_engine(tiny_model, {"method": "grammar"}), FORMS["json"][0], max_tokens=3)
    assert len(result.token_ids) == 3
    assert result.last.finish_reason is FinishReason.LENGTH


def test_padded_ids_beyond_the_tokenizer_are_never_drawn(draft_models: DraftModels) -> None:
    """The padding's logits are the highest of half of all rows."""
    assert FORMS["json"][1](one(make_engine(draft_models.padded), FORMS["json"][0]).text)


def test_what_is_forced_is_drafted_and_stands(tiny_model: Path) -> None:
    """Digits leave one way to write them: the whole text is one draft, its end included."""
    engine = make_engine(tiny_model, {"method": "grammar"})
    result = one(engine, {"choice": ["7391505"]})
    assert result.text == "7391505"
    spec = result.last.metrics.speculative_decoding
    assert spec["num_accepted_draft_tokens"] == spec["num_draft_tokens"] == len(result.token_ids) - 1
    assert spec["num_spec_steps"] == 1


def test_a_request_without_a_form_has_no_draft_of_the_grammars(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, {"method": "grammar"})
    run(engine, [(prompts(1)[0], SamplingParams(temperature=0, max_tokens=20))])
    assert engine.stats().spec.num_draft_tokens == 0
