"""C20: n answers to one prompt. Each is a request with noise of its own, and speculation changes none of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.llm import CompletionOutput
from forerun.request import SamplingParams
from tests.cases.conftest import Serve
from tests.cases.material import CHAT, COMPLETIONS, LOOPS, Answer, complete, events, metric, prompt_of
from tests.methods import METHODS, PERFECT, DraftModels
from tests.tiny_engine import Result, make_engine, run

PROMPT = prompt_of(51, 6, 7)  # two full blocks that all answers share
BESIDE = LOOPS[4]  # an ordinary request, which n-grams draft
SPECS = {
    "plain": lambda _: None,
    "ngram": METHODS["ngram"],
    "draft model": METHODS["draft_model"],
    "self-draft": PERFECT["draft_model"],
}
SERVED = ["ngram", "self"]
GREEDY = SamplingParams(n=4, temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(n=4, temperature=1, seed=5, max_tokens=24, ignore_eos=True, logprobs=2)
ORDINARY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

References = Callable[[list[int], SamplingParams], list[Result]]


@pytest.fixture(scope="module")
def refs(tiny_model: Path) -> References:
    """REF of each choice: asked for alone, without speculation."""
    engine = make_engine(tiny_model)
    return lambda prompt, params: [run(engine, [(prompt, params)], choice=i)[0] for i in range(params.n)]


@pytest.fixture(params=SPECS)
def llm(request: pytest.FixtureRequest, tiny_model: Path, draft_models: DraftModels) -> Iterator[LLM]:
    """Two seats: not all four choices run together."""
    spec = SPECS[request.param](draft_models)
    llm = LLM(str(tiny_model), speculative_config=spec, kv_cache_memory_bytes=4 << 20, max_num_seqs=2)
    yield llm
    assert llm.stats.num_blocks_used == 0


def key(answer: CompletionOutput) -> tuple[Any, ...]:
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason


def dividing_stop(results: list[Result]) -> str:
    """A character at which at least two answers end, at different places."""
    for char in results[0].text[2:]:
        places = {r.text.find(char) for r in results} - {-1}
        if len(places) > 1:
            return char
    raise AssertionError("no such character: choose another seed")


def test_greedy_choices_are_all_the_reference(llm: LLM, refs: References) -> None:
    result, beside = llm.generate([PROMPT, BESIDE], [GREEDY, ORDINARY])
    assert [a.index for a in result.outputs] == [0, 1, 2, 3]
    (expected,) = refs(PROMPT, dataclasses.replace(GREEDY, n=1))
    assert [key(a) for a in result.outputs] == [expected.key] * 4
    assert [key(a) for a in beside.outputs] == [refs(BESIDE, ORDINARY)[0].key]
    figures = [a.metrics.speculative_decoding for a in (*result.outputs, *beside.outputs)]
    assert all(f is None or f["num_draft_tokens"] > 0 for f in figures), "somebody stopped drafting"


def test_sampled_choices_differ_and_come_again(llm: LLM, refs: References) -> None:
    (result,) = llm.generate(PROMPT, SAMPLED)
    expected = refs(PROMPT, SAMPLED)
    assert [key(a) for a in result.outputs] == [e.key for e in expected]
    assert len({tuple(a.token_ids) for a in result.outputs}) == 4
    assert [a.logprobs for a in result.outputs] == [e.logprobs for e in expected]
    (again,) = llm.generate(PROMPT, SAMPLED)
    assert [key(a) for a in again.outputs] == [key(a) for a in result.outputs]
    (alone,) = llm.generate(PROMPT, dataclasses.replace(SAMPLED, n=1))
    assert key(alone.outputs[0]) == key(result.outputs[0])
    assert alone.num_cached_tokens >= 32
    assert result.num_cached_tokens == 0, "what the choices share was not there before the prompt came"


def test_each_choice_stops_for_itself(llm: LLM, refs: References) -> None:
    params = dataclasses.replace(SAMPLED, n=3)
    params = dataclasses.replace(params, stop=(dividing_stop(refs(PROMPT, params)),))
    (result,) = llm.generate(PROMPT, params)
    assert [key(a) for a in result.outputs] == [e.key for e in refs(PROMPT, params)]
    assert [a.finish_reason for a in result.outputs].count("stop") >= 2
    assert len({len(a.token_ids) for a in result.outputs}) > 1
    assert all(a.metrics is not None for a in result.outputs)


def test_a_seed_that_was_drawn_brings_all_choices_again(llm: LLM) -> None:
    free = dataclasses.replace(SAMPLED, seed=None)
    (result,) = llm.generate(PROMPT, free)
    (again,) = llm.generate(PROMPT, dataclasses.replace(free, seed=result.seed))
    assert [key(a) for a in again.outputs] == [key(a) for a in result.outputs]
    assert len({tuple(a.token_ids) for a in result.outputs}) == 4


def body(params: SamplingParams) -> dict[str, Any]:
    fields = ("n", "temperature", "seed", "max_tokens", "ignore_eos", "logprobs")
    return {name: getattr(params, name) for name in fields} | {"stop": list(params.stop), "return_token_ids": True}


def whole(http: httpx.Client, asked: dict[str, Any]) -> tuple[list[Answer], dict[str, Any]]:
    """(choices, usage); the indices are in order."""
    content = http.post(COMPLETIONS, json=asked).json()
    assert [c["index"] for c in content["choices"]] == list(range(len(content["choices"])))
    answers = [Answer() for _ in content["choices"]]
    for choice in content["choices"]:
        answers[choice["index"]].add(choice)
    return answers, content["usage"]


def streamed(http: httpx.Client, asked: dict[str, Any], number: int) -> tuple[list[Answer], dict[str, Any]]:
    """(choices, usage); each choice ends once, and nothing of it comes later."""
    *chunks, last = events(http, COMPLETIONS, asked | {"stream_options": {"include_usage": True}})
    answers = [Answer() for _ in range(number)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            answer = answers[choice["index"]]
            assert answer.finish_reason is None, "a chunk after the last one"
            answer.add(choice)
    assert last["choices"] == []
    return answers, last["usage"]


def assert_all(answers: list[Answer], expected: list[Result]) -> None:
    assert [(a.token_ids, a.text, a.finish_reason, a.stop_reason) for a in answers] == [e.key for e in expected]
    for answer, result in zip(answers, expected, strict=True):
        assert answer.token_logprobs == [e.logprob for e in result.logprobs]


@pytest.mark.parametrize("method", SERVED)
@pytest.mark.parametrize("kind", ["greedy", "sampled", "stopped"])
def test_choices_over_http(kind: str, method: str, serve: Serve, refs: References) -> None:
    """C20 over HTTP: in one piece and streaming, with usage, while an ordinary request beside it drafts."""
    params = GREEDY if kind == "greedy" else SAMPLED
    if kind == "stopped":
        params = dataclasses.replace(params, n=3)
        params = dataclasses.replace(params, stop=(dividing_stop(refs(PROMPT, params)),))
    expected = refs(PROMPT, params)
    with serve(method).http() as http, ThreadPoolExecutor(2) as pool:
        drafted = metric(http, "vllm:spec_decode_num_accepted_tokens_total")
        beside = pool.submit(complete, http, BESIDE, max_tokens=40, ignore_eos=True)
        asked = {"prompt": PROMPT} | body(params)
        for answers, usage in (whole(http, asked), streamed(http, asked, params.n)):
            assert_all(answers, expected)
            assert usage["prompt_tokens"] == len(PROMPT)
            assert usage["completion_tokens"] == sum(len(e.token_ids) for e in expected)
            assert usage["prompt_tokens_details"]["cached_tokens"] <= len(PROMPT)
        assert beside.result().token_ids == refs(BESIDE, ORDINARY)[0].token_ids
        assert metric(http, "vllm:spec_decode_num_accepted_tokens_total") > drafted


@pytest.mark.parametrize("method", SERVED)
def test_prompts_times_n_come_prompt_by_prompt(method: str, serve: Serve, refs: References) -> None:
    """Five prompts and n=4: more than the 16 seats. The choices of prompt p have the indices 4p to 4p + 3."""
    prompts = [PROMPT, *LOOPS[:4]]
    expected = [result for prompt in prompts for result in refs(prompt, SAMPLED)]
    with serve(method).http() as http:
        asked = {"prompt": prompts} | body(SAMPLED)
        for answers, usage in (whole(http, asked), streamed(http, asked, 20)):
            assert_all(answers, expected)
            assert usage["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("method", SERVED)
def test_choices_of_a_chat(method: str, serve: Serve) -> None:
    """The stream opens each choice with the role, and joins to the answer in one piece."""
    asked = (
        {"messages": [{"role": "user", "content": "again and again and again"}]} | body(SAMPLED) | {"logprobs": True}
    )
    with serve(method).http() as http:
        choices = http.post(CHAT, json=asked).json()["choices"]
        chunks = [c for chunk in events(http, CHAT, asked) for c in chunk["choices"]]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    assert len({c["message"]["content"] for c in choices}) == 4
    for choice in choices:
        first, *rest = [c for c in chunks if c["index"] == choice["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in rest) == choice["message"]["content"]
        assert [i for c in rest for i in c["token_ids"]] == choice["token_ids"]
        entries = [entry for c in rest if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in rest] == [None] * (len(rest) - 1) + [choice["finish_reason"]]
