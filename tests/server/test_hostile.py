"""Requests made up from the OpenAPI description, and parts of the server that fail in every way: no 500 that was not
meant, and nothing of the machine in any answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.schemas import OpenApiSchema

from forerun.errors import ForerunError
from tests.server.fake_engine import ByteTokenizer, fake_factory
from tests.server.live import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SECRET = "/home/someone/secret.py"


@pytest.fixture(scope="module")
def quick() -> Iterator[LiveServer]:
    with LiveServer(factory=fake_factory(step_s=0.0, burst=8)) as live:
        yield live


@pytest.fixture(scope="module")
def described(quick: LiveServer) -> OpenApiSchema:
    return schemathesis.openapi.from_url(f"{quick.url}/openapi.json")


def send_many(described: OpenApiSchema, number: int) -> None:
    """So many requests for each operation: a 4xx in our own form, or an answer."""
    operations = [result.ok() for result in described.get_all_operations()]
    assert {operation.path for operation in operations} >= {COMPLETIONS, CHAT, "/tokenize", "/detokenize"}
    for operation in operations:

        @settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(operation.as_strategy())
        def judge(case: schemathesis.Case) -> None:
            response = case.call()
            assert response.status_code < 500, response.text
            assert "Traceback" not in response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        judge()


def test_requests_by_the_description(described: OpenApiSchema) -> None:
    send_many(described, 25)


@pytest.mark.slow
def test_many_requests_by_the_description(described: OpenApiSchema) -> None:
    send_many(described, 300)


class BrokenTokenizer(ByteTokenizer):
    """What is in `broken` raises, and what it raises tells of the machine."""

    broken = ""

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "broken"):
            raise OSError(2, "no such file", SECRET)
        return object.__getattribute__(self, name)


@pytest.fixture(autouse=True)
def _nothing_unforeseen() -> None:
    """The package's own watch for unforeseen errors, which are what is wanted here."""


@pytest.fixture(scope="module")
def broken() -> Iterator[LiveServer]:
    with LiveServer(factory=fake_factory(step_s=0.0), tokenizer=BrokenTokenizer()) as live:
        yield live


def raises(kind: Callable[[str], Exception]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise kind(f'File "{SECRET}", line 7: Traceback (most recent call last)')

    return fail


ASK = {"prompt": "hello", "max_tokens": 5, "logprobs": 1}
BREAK: dict[str, tuple[str, dict[str, Any] | None]] = {
    "encode": (COMPLETIONS, ASK),
    "apply_chat_template": (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    "has_chat_template": (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    "max_token_bytes": (COMPLETIONS, ASK),
    "token_text": (COMPLETIONS, ASK),
    "decode": ("/detokenize", {"tokens": [1]}),
}


def assert_nothing_shown(response: httpx.Response) -> None:
    assert SECRET not in response.text
    assert "Traceback" not in response.text
    assert "line 7" not in response.text
    assert SECRET not in str(response.headers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BREAK)
def test_a_tokenizer_that_fails_shows_nothing(broken: LiveServer, name: str, stream: bool) -> None:
    path, body = BREAK[name]
    tokenizer = broken._tokenizer
    assert isinstance(tokenizer, BrokenTokenizer)
    tokenizer.broken = name
    try:
        with broken.http() as http:
            response = http.post(path, json=body | {"stream": True} if stream and path != "/detokenize" else body)
    finally:
        tokenizer.broken = ""
    assert_nothing_shown(response)
    assert response.status_code >= 500 or '"code":500' in response.text
    with broken.http() as http:
        assert http.post(COMPLETIONS, json=ASK).status_code == 200


@pytest.mark.parametrize("kind", [OSError, KeyError, MemoryError, RecursionError, AssertionError, ForerunError])
@pytest.mark.parametrize("name", ["check_room", "_submit", "generate_many", "stats"])
def test_a_client_of_the_engine_that_fails_shows_nothing(
    broken: LiveServer, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception]
) -> None:
    monkeypatch.setattr(broken.client, name, raises(kind))
    with broken.http() as http:
        for path in ("/metrics", "/v1/speculation") if name == "stats" else (COMPLETIONS,):
            response = http.get(path) if name == "stats" else http.post(path, json=ASK | {"stream": True})
            assert_nothing_shown(response)
            assert response.status_code == 500 or '"code":500' in response.text
    monkeypatch.undo()
    with broken.http() as http:
        assert http.post(COMPLETIONS, json=ASK).status_code == 200


def test_an_answer_that_fails_in_mid_stream_ends_with_an_error(
    broken: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.server.answers import CompletionAnswer

    whole = CompletionAnswer.closing
    for name in ("delta", "closing", "opening"):
        with monkeypatch.context() as patch, broken.http() as http:
            patch.setattr(CompletionAnswer, name, raises(ValueError))
            response = http.post(COMPLETIONS, json=ASK | {"stream": True})
            assert_nothing_shown(response)
            events = [line for line in response.text.split("\n\n") if line]
            assert json.loads(events[-2].removeprefix("data: "))["error"]["message"] == "internal server error"
            assert events[-1] == "data: [DONE]"
    assert CompletionAnswer.closing is whole
    broken.wait_until(lambda: broken.client.num_running == 0)


@pytest.mark.parametrize(
    "target", ["/none", "/v1/%00", "/../../etc/passwd", "/v1/models/..%2f..%2fetc", "/%ff", "/docs/../../x"]
)
def test_paths_that_are_not_served_show_nothing(quick: LiveServer, target: str) -> None:
    with quick.http() as http:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "TRACE"):
            response = http.request(method, target)
            assert response.status_code in (400, 404, 405), response.text
            assert "forerun/" not in response.text
