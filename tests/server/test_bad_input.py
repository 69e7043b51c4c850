"""Whatever is wrong with a request: a 4xx that names the field, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def refused(http: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused; a plain request works afterwards."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert "Traceback" not in response.text
    assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**64),
        ("seed", 10**30),
        ("seed", "7"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "many"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", {"a": 1}),
        ("stop", ["a", 1]),
        ("stop", ["a"] * 65),
        ("stop", "a" * 1025),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
        ("cache_salt", ""),
        ("request_id", "x" * 300),
        ("user", 1),
        ("max_draft_tokens", -1),
        ("n", 0),
        ("n", 129),
        ("n", 10**30),
        ("n", True),
        ("n", "2"),
        ("n", 1.5),
        ("best_of", True),
        ("best_of", 0),
        ("best_of", 129),
        ("min_p", 1.5),
        ("min_p", "0.1"),
        ("presence_penalty", 2.1),
        ("presence_penalty", True),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(VOCAB_SIZE): 1}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"9" * 40: 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [VOCAB_SIZE]),
        ("allowed_token_ids", [10**30]),
        ("allowed_token_ids", [True]),
        ("bad_words", [""]),
        ("bad_words", ["ok", " "]),
        ("bad_words", "text"),
        ("bad_words", ["x"] * 1025),
        ("min_tokens", -1),
        ("min_tokens", 3),
        ("min_tokens", 10**30),
        ("logprob_token_ids", [VOCAB_SIZE]),
        ("logprob_token_ids", [1] * 129),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 10**30),
        ("truncation_side", "middle"),
        ("thinking_token_budget", -2),
        ("thinking_token_budget", 10**30),
        ("vllm_xargs", {"a": 10**30}),
        ("vllm_xargs", [1]),
        ("length_penalty", 2.0),
        ("early_stopping", True),
        ("use_beam_search", 1),
        ("prompt", 1),
        ("prompt", {}),
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [""]),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("prompt", ["a", 1]),
        ("prompt", [[1], "a"]),
        ("prompt", [1, True]),
        ("prompt", [1.0]),
        ("prompt", [[1, None]]),
        ("prompt", [-1]),
        ("prompt", [VOCAB_SIZE]),
        ("prompt", [[1], [10**30]]),
        ("prompt", "\ud800"),
        ("prompt", ["ok", "x\udfff"]),
        ("stop", "\ud83d"),
        ("prompt", ["a"] * 1025),
    ],
)
def test_a_wrong_completion_field_is_named(http: httpx.Client, field: str, value: Any) -> None:
    error = refused(http, COMPLETIONS, {"prompt": "hello", "max_tokens": 2} | {field: value})
    assert error["param"].partition("[")[0] == field
    assert field in error["message"]
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize("wrong", ["", 1, None, "a" * 1025])
def test_a_wrong_stop_string_is_named_by_its_index(http: httpx.Client, wrong: Any) -> None:
    error = refused(http, COMPLETIONS, {"prompt": "hello", "stop": ["good", "better", wrong, "best"]})
    assert "stop[2]" in error["message"]
    assert "better" not in error["message"]


NOT_SERVED = [
    ("repetition_detection", {"max_pattern_size": 4}),
    ("logits_processors", ["my.module:Class"]),
    ("watermarking", {"key": 1}),
    ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"regex": "a+"}),
    ("guided_json", {}),
    ("priority", 1),
]


@pytest.mark.parametrize(("field", "value"), [*NOT_SERVED, ("suffix", "end"), ("prompt_embeds", "AAAA")])
def test_what_completions_do_not_serve_yet_is_refused_by_name(http: httpx.Client, field: str, value: Any) -> None:
    error = refused(http, COMPLETIONS, {"prompt": "hello", field: value})
    assert error["param"] == field
    assert "not served yet" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *NOT_SERVED,
        ("echo", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("reasoning_effort", "high"),
        ("modalities", ["text", "audio"]),
        ("documents", [{"a": "b"}]),
        ("chat_template", "{{ messages }}"),
        ("add_special_tokens", True),
    ],
)
def test_what_chat_does_not_serve_yet_is_refused_by_name(http: httpx.Client, field: str, value: Any) -> None:
    error = refused(http, CHAT, {"messages": [{"role": "user", "content": "hi"}], field: value})
    assert error["param"] == field
    assert "not served yet" in error["message"]


NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "use_beam_search": False,
    "echo": False,
    "prompt_logprobs": None,
    "structured_outputs": None,
    "bad_words": [],
    "stop": None,
    "user": "me",
    "seed": None,
    "length_penalty": 1.0,
    "stream": False,
    "stream_options": None,
    "logprobs": None,
    "metadata": None,
    "top_k": -1,
}


def test_values_that_ask_for_nothing_pass(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "suffix": None} | NEUTRAL
    assert http.post(COMPLETIONS, json=body).status_code == 200
    chat = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "max_completion_tokens": 2}
    messages = [{"role": "user", "content": "hi", "tool_calls": None}]
    assert http.post(CHAT, json={"messages": messages} | NEUTRAL | chat).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "nearest"),
    [
        (COMPLETIONS, "temprature", "temperature"),
        (COMPLETIONS, "max_token", "max_tokens"),
        (COMPLETIONS, "zzzzzz", None),
        (CHAT, "max_completion_token", "max_completion_tokens"),
        (CHAT, "prompt", None),
        (COMPLETIONS, "messages", None),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(
    http: httpx.Client, path: str, field: str, nearest: str | None
) -> None:
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    error = refused(http, path, body | {field: None})
    assert error["param"] == field
    assert nearest is None or repr(nearest) in error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "hi"}, {"role": "tool", "content": "x"}], "messages[1].role"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "hi", "nmae": "x"}], "messages[0].nmae"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ],
)
def test_a_wrong_message_is_named(http: httpx.Client, messages: Any, param: str) -> None:
    assert refused(http, CHAT, {"messages": messages})["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"refuse": "no"}}, "messages"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"messages": None}, "messages"),
    ],
)
def test_a_wrong_chat_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    assert refused(http, CHAT, body)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"17",
        b'{"prompt": "a",}',
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": ' + b"[" * 50_000,
        b'{"prompt": "a", "x": ' + b'{"x":' * 20_000,
        b"{'prompt': 'a'}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    assert refused(http, COMPLETIONS, body)["param"] == "body"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "seed": 1, "seed": 2}', "seed"),
        (b'{"prompt": "a", "\\ud800": 1}', None),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "prompt"),
    ],
)
def test_json_that_python_reads_too_kindly_is_refused(http: httpx.Client, body: bytes, param: str | None) -> None:
    assert refused(http, COMPLETIONS, body)["param"] == param


def test_a_prompt_too_long_says_both_numbers(http: httpx.Client) -> None:
    error = refused(http, COMPLETIONS, {"prompt": "a" * 600})
    assert "600" in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]
    assert error["param"] == "prompt"
    error = refused(http, CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})
    assert error["param"] == "messages"


def test_a_body_too_large_is_refused_with_413_declared_or_not(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "a" * 300_000}).encode()
    assert refused(http, COMPLETIONS, body, 413)["param"] == "body"
    pieces = http.post(COMPLETIONS, content=iter([body[:100_000], body[100_000:]]))
    assert pieces.status_code == 413


def test_an_unknown_model_is_404_and_an_absent_one_is_ours(http: httpx.Client) -> None:
    error = refused(http, COMPLETIONS, {"model": "gpt-5", "prompt": "a"}, 404)
    assert error["type"] == "NotFoundError"
    assert error["param"] == "model"
    assert http.post(COMPLETIONS, json={"prompt": "a", "model": "alias"}).json()["model"] == "alias"
    assert http.post(COMPLETIONS, json={"prompt": "a"}).json()["model"] == "fake"


def test_unknown_paths_and_methods_have_the_same_error_form(http: httpx.Client) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", COMPLETIONS, 405), ("POST", "/v1/models", 405)):
        response = http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["code"] == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "status", "message"), [("!reject", 400, "does not like"), ("!broken", 500, "could not go on")]
)
def test_what_the_engine_refuses_has_its_status_streaming_or_not(
    http: httpx.Client, prompt: str, status: int, message: str, stream: bool
) -> None:
    error = refused(http, COMPLETIONS, {"prompt": prompt, "stream": stream}, status)
    assert message in error["message"]
    assert "/some/path" not in error["message"]


def test_a_temperature_near_0_is_served(http: httpx.Client) -> None:
    assert http.post(COMPLETIONS, json={"prompt": "a", "temperature": 0.001}).status_code == 200


def test_huge_limits_mean_no_limit(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "a" * 500, "max_tokens": 10**20, "top_k": 10**20})
    assert response.json()["usage"]["completion_tokens"] == MAX_MODEL_LEN - 500
