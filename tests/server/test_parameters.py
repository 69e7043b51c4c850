"""Sampling fields over HTTP, on a real engine that drafts: each answer is what the offline front gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import LLM, SamplingParams
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.server.settings import ServerSettings
from forerun.spec.config import SpeculativeConfig
from tests.cases.material import CHAT, COMPLETIONS, events
from tests.cases.served import build_served
from tests.server.live import LiveServer
from tests.server.test_bad_input import refused
from tests.tiny_engine import NGRAM

PROMPT = [40, 41, 42, 43, 44] * 3


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), speculative_config=NGRAM, kv_cache_memory_bytes=2 << 20)


@pytest.fixture(scope="module")
def http(tiny_model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log = tmp_path_factory.mktemp("core") / "log"
    factory = partial(build_served, model=str(tiny_model), log=str(log))
    server = LiveServer(
        ServerSettings(model="tiny"),
        factory,
        tokenizer,  # type: ignore[arg-type]
        speculative_config=SpeculativeConfig.parse(NGRAM),
        kv_cache_memory_bytes=2 << 20,
    )
    with server, server.http() as client:
        yield client


def post(http: httpx.Client, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"max_tokens": 8, "temperature": 0, "return_token_ids": True} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


FIELDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4},
    {"logit_bias": {"50": 30, "60": -100}},
    {"allowed_token_ids": [40, 41, 50]},
    {"bad_words": ["e", "th", "ab"]},
    {"min_tokens": 6, "stop_token_ids": [41, 42]},
    {"min_p": 0.4},
    {"truncate_prompt_tokens": 4},
    {"truncate_prompt_tokens": 4, "truncation_side": "right"},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_field_means_what_it_means_offline(
    http: httpx.Client, llm: LLM, fields: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(**{"max_tokens": 8, "temperature": temperature, "seed": 5} | fields)
    (expected,) = llm.generate([PROMPT], params)
    (choice,) = post(http, prompt=PROMPT, temperature=temperature, seed=5, **fields)["choices"]
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["prompt_token_ids"] == expected.prompt_token_ids


def test_prompt_log_probabilities_have_vllms_form(http: httpx.Client, llm: LLM, tokenizer: Tokenizer) -> None:
    (expected,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert expected.prompt_logprobs is not None
    (choice,) = post(http, prompt=PROMPT, prompt_logprobs=2)["choices"]
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    for entry, own in zip(entries, expected.prompt_logprobs[1:], strict=True):
        assert own is not None
        given = entry[str(own.token_id)]
        assert given["rank"] == own.rank
        assert given["logprob"] == pytest.approx(own.logprob, abs=1e-5)
        assert given["decoded_token"] == tokenizer.token_text(own.token_id)
        assert {int(i) for i in entry} == {own.token_id, *(i for i, _ in own.top)}
    chat = post(http, CHAT, messages=[{"role": "user", "content": "hi"}], prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_puts_the_prompt_before_the_answer(
    http: httpx.Client, tokenizer: Tokenizer, stream: bool, logprobs: int | None
) -> None:
    body = {"prompt": "hello hello", "n": 2, "logprobs": logprobs, "max_tokens": 6, "temperature": 0}
    plain = post(http, **body)["choices"][0]
    choices: list[dict[str, Any]] = [{"text": "", "tokens": [], "values": [], "offsets": []} for _ in range(2)]
    parts = (
        [c for chunk in events(http, COMPLETIONS, body | {"echo": True}) for c in chunk["choices"]]
        if stream
        else post(http, **body, echo=True)["choices"]
    )
    for part in parts:
        choice = choices[part["index"]]
        choice["text"] += part["text"]
        if part["logprobs"] is not None:
            choice["tokens"] += part["logprobs"]["tokens"]
            choice["values"] += part["logprobs"]["token_logprobs"]
            choice["offsets"] += part["logprobs"]["text_offset"]
    for choice in choices:
        assert choice["text"] == "hello hello" + plain["text"]
        if logprobs is not None:
            ids = tokenizer.encode("hello hello")
            assert choice["tokens"] == [tokenizer.token_text(i) for i in ids] + plain["logprobs"]["tokens"]
            assert choice["values"][0] is None
            assert all(value <= 0 for value in choice["values"][1:])
            assert choice["values"][len(ids) :] == pytest.approx(plain["logprobs"]["token_logprobs"])
            assert choice["offsets"] == sorted(choice["offsets"])


def test_logprob_token_ids_stand_in_the_place_of_the_likeliest(http: httpx.Client, tokenizer: Tokenizer) -> None:
    asked = [50, 60, 61]
    (choice,) = post(http, prompt=PROMPT, logprob_token_ids=asked)["choices"]
    assert len(choice["logprobs"]["top_logprobs"]) == 8
    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert set(top) == {token, *(tokenizer.token_text(i) for i in asked)}
    messages = [{"role": "user", "content": "hi"}]
    content = post(http, CHAT, messages=messages, logprob_token_ids=asked)["choices"][0]["logprobs"]["content"]
    assert all([t["token"] for t in e["top_logprobs"]] == [tokenizer.token_text(i) for i in asked] for e in content)


def test_best_of_gives_the_likeliest_and_counts_all(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 8}
    made = post(http, **body, n=5, logprobs=0)
    given = post(http, **body, n=2, best_of=5)
    best = sorted(made["choices"], key=lambda c: -sum(c["logprobs"]["token_logprobs"]))[:2]
    assert [c["token_ids"] for c in given["choices"]] == [c["token_ids"] for c in best]
    assert [c["index"] for c in given["choices"]] == [0, 1]
    assert given["choices"][0]["logprobs"] is None
    assert given["usage"]["completion_tokens"] == made["usage"]["completion_tokens"]


def test_beam_search_gives_its_best_sequences(http: httpx.Client, llm: LLM) -> None:
    from forerun.beam import BeamSearchParams

    (expected,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=3, max_tokens=8))
    answer = post(http, prompt=PROMPT, use_beam_search=True, n=3)
    assert [PROMPT + c["token_ids"] for c in answer["choices"]] == [s.tokens for s in expected.sequences]
    assert [c["finish_reason"] for c in answer["choices"]] == [s.finish_reason for s in expected.sequences]
    assert answer["choices"][0]["text"]
    assert post(http, CHAT, messages=[{"role": "user", "content": "hi"}], use_beam_search=True, n=2)["choices"][1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "echo": True}, "echo"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"vllm_xargs": {"a": 1}}, "extra_args"),
        ({"thinking_token_budget": 4}, "thinking_token_budget"),
        ({"allowed_token_ids": [5], "min_tokens": 2, "stop_token_ids": [5]}, None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_go_together_is_refused(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    error = refused(http, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4} | fields)
    assert error["param"] == param
    assert error["type"] == "BadRequestError"


def test_min_p_and_a_penalty_hold_in_the_log_probabilities_of_an_answer(http: httpx.Client) -> None:
    (choice,) = post(http, prompt=PROMPT, temperature=1.0, seed=3, min_p=0.5, logprobs=1, max_tokens=32)["choices"]
    for value, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert value >= max(top.values()) + math.log(0.5) - 1e-5
