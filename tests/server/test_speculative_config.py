"""`speculative_config` in a request's body: what is refused with HTTP 400, and what the engine is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forerun.server.job import JobMaker
from forerun.server.models import ChatBody, CompletionBody
from forerun.server.settings import ServerSettings
from tests.server.fake_engine import NUM_SPEC_TOKENS, SPEC_METHODS, fake_factory
from tests.server.live import LiveServer

PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
OFF = [{"num_speculative_tokens": 0}, {"method": "none"}, {"method": ["none"]}, {}]


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    with LiveServer(ServerSettings(model="fake"), fake_factory(speculation=False)) as live, live.http() as http:
        yield http


def ask(http: httpx.Client, path: str, asked: Any, **body: Any) -> httpx.Response:
    return http.post(path, json={"max_tokens": 3, "speculative_config": asked} | PATHS[path] | body)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("asked", "param", "part"),
    [
        ({"num_speculative_tokens": NUM_SPEC_TOKENS + 1}, ".num_speculative_tokens", f"0 to {NUM_SPEC_TOKENS}"),
        ({"num_speculative_tokens": -1}, ".num_speculative_tokens", "got -1"),
        ({"num_speculative_tokens": "2"}, ".num_speculative_tokens", 'got "2"'),
        ({"method": "eagle3"}, ".method", 'loaded: "suffix", "ngram"'),
        ({"method": ["suffix", "mtp"]}, ".method", '"mtp" is not loaded'),
        ({"method": []}, ".method", "got []"),
        ({"metod": "suffix"}, ".metod", 'did you mean "method"?'),
        ({"model": "/etc"}, ".model", 'unknown key "model"'),
        (5, "", "got 5"),
        ("suffix", "", "suffix"),
        ([], "", "got []"),
    ],
)
def test_a_bad_wish_is_http_400_and_names_the_key(
    http: httpx.Client, path: str, asked: Any, param: str, part: str
) -> None:
    response = ask(http, path, asked)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == f"speculative_config{param}"
    assert error["type"] == "BadRequestError"
    assert part in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "asked",
    [*OFF, None, {"num_speculative_tokens": 4}, {"method": "suffix"}, {"method": ["ngram", "suffix"]}],
    ids=str,
)
def test_a_good_wish_is_answered(http: httpx.Client, path: str, asked: Any) -> None:
    for stream in (False, True):
        assert ask(http, path, asked, stream=stream).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_server_without_speculation_takes_what_switches_it_off(plain: httpx.Client, path: str) -> None:
    for asked in OFF:
        assert ask(plain, path, asked).status_code == 200
    for asked in ({"num_speculative_tokens": 1}, {"method": "suffix"}):
        response = ask(plain, path, asked)
        assert response.status_code == 400
        assert "runs without speculation" in response.json()["error"]["message"]


def test_the_two_bounds_of_a_body_exclude_each_other(http: httpx.Client) -> None:
    response = ask(http, "/v1/completions", {"num_speculative_tokens": 2}, max_draft_tokens=2)
    assert response.status_code == 400
    assert "exclude each other" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "max_draft_tokens", "draft_methods", "rule"),
    [
        ({}, None, None, ""),
        ({"max_draft_tokens": 3}, 3, None, ""),
        ({"speculative_config": {"num_speculative_tokens": 3}}, 3, None, ""),
        ({"speculative_config": {"method": ["ngram"]}}, None, ("ngram",), ""),
        ({"speculative_config": {"method": "none"}}, 0, None, ""),
        ({"speculative_config": {"rejection_sample_method": "standard"}}, None, None, "standard"),
    ],
)
def test_the_engine_is_told(body: dict[str, Any], max_draft_tokens: Any, draft_methods: Any, rule: str) -> None:
    for kind, path in ((CompletionBody, "/v1/completions"), (ChatBody, "/v1/chat/completions")):
        read = kind.read(PATHS[path] | body)
        drafts = read.speculation(SPEC_METHODS, NUM_SPEC_TOKENS, "fly")
        job = JobMaker(0).make("x", "m", read, read.sampling(), [[1], [2]], "", drafts, "")
        for request in job.requests:
            assert request.max_draft_tokens == max_draft_tokens
            assert request.draft_methods == draft_methods
            assert request.rejection_sample_method == rule


@pytest.fixture(scope="module")
def lossy() -> Iterator[httpx.Client]:
    """A server that runs fly, with no per-request figures asked for; each step accepts one token loosely."""
    with LiveServer(ServerSettings(model="fake"), fake_factory(rule="fly")) as live, live.http() as http:
        yield http


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("n", [1, 2])
def test_every_answer_under_a_lossy_rule_says_so(lossy: httpx.Client, path: str, body: dict[str, Any], n: int) -> None:
    asked = {"max_tokens": 10, "n": n} | PATHS[path] | body
    response = lossy.post(path, json=asked)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    answers = [json.loads(line) for line in lines if line != "[DONE]"]
    said = [part["metrics"] for answer in answers for part in (answer, *answer["choices"]) if "metrics" in part]
    figures = {"rejection_sample_method": "fly", "lossless": "no", "num_loosely_accepted_tokens": 3}
    assert said == [{"speculative_decoding": figures}] * n


def test_who_asks_for_a_stricter_rule_has_it_and_a_looser_one_is_refused(
    lossy: httpx.Client, http: httpx.Client
) -> None:
    answer = ask(lossy, "/v1/completions", {"rejection_sample_method": "match"})
    assert answer.status_code == 200
    assert "metrics" not in answer.json()
    refused = ask(http, "/v1/completions", {"rejection_sample_method": "fly"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculative_config.rejection_sample_method"
    assert 'own is "match"' in refused.json()["error"]["message"]


def test_the_server_says_what_its_rule_promises(lossy: httpx.Client, http: httpx.Client) -> None:
    found = lossy.get("/v1/speculation").json()
    assert (found["rejection_sample_method"], found["lossless"]) == ("fly", "no")
    assert found["request_rejection_sample_methods"] == ["fly", "match", "standard"]
    ask(lossy, "/v1/completions", None)
    totals = lossy.get("/v1/speculation").json()["totals"]
    assert totals["num_loosely_accepted_tokens"] > 0
    text = lossy.get("/metrics").text
    name = "forerun:spec_decode_num_loosely_accepted_tokens_total{"
    [counted] = [line for line in text.splitlines() if line.startswith(name)]
    assert float(counted.split()[-1]) == totals["num_loosely_accepted_tokens"]
    [rule] = [line for line in text.splitlines() if line.startswith("forerun:spec_decode_rule_info{")]
    assert 'lossless="no"' in rule
    assert 'rejection_sample_method="fly"' in rule
    assert http.get("/v1/speculation").json()["lossless"] == "path"


def test_the_server_says_which_methods_it_has_loaded(http: httpx.Client, plain: httpx.Client) -> None:
    assert http.get("/v1/speculation").json()["methods"] == list(SPEC_METHODS)
    assert plain.get("/v1/speculation").json()["methods"] == []


def test_the_schema_of_the_api_knows_the_field(http: httpx.Client) -> None:
    assert http.get("/openapi.json").text.count('"speculative_config"') >= len(PATHS)
