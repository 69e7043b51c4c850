"""`/v1/responses` by the official client, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from forerun.server.response_store import ResponseStore
from forerun.server.settings import ServerSettings
from tests.server.fake_engine import answer_text, fake_factory
from tests.server.live import LiveServer
from tests.server.test_bad_input import refused
from tests.server.test_tools import PARIS

RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    settings = ServerSettings(
        model="fake", reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True
    )
    with LiveServer(settings, fake_factory(step_s=0.0005)) as live:
        yield live


@pytest.fixture(scope="module")
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with live.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def create(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.responses.create(model="fake", input=f"!say {text}", **fields)


def test_a_response_whole(client: openai.OpenAI) -> None:
    response = create(client, "hm</think>Good.", instructions="be brief", temperature=0.5, metadata={"a": "b"})
    assert response.status == "completed"
    assert response.output_text == "Good."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "hm"
    assert response.usage.output_tokens == len("hm</think>Good.")
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.temperature, response.metadata, response.instructions) == (0.5, {"a": "b"}, "be brief")
    cut = client.responses.create(model="fake", input="hi", max_output_tokens=5)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]


def test_a_response_streamed_says_each_thing_once_and_in_order(client: openai.OpenAI) -> None:
    events = list(create(client, f"hm</think>Look:\n{PARIS}", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    reasoning, message, call = events[-1].response.output
    assert reasoning.content[0].text == "hm"
    assert message.content[0].text == "Look:"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    for kind, whole in (
        ("response.reasoning_text.delta", "hm"),
        ("response.output_text.delta", "Look:"),
        ("response.function_call_arguments.delta", call.arguments),
    ):
        assert "".join(event.delta for event in events if event.type == kind) == whole
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [reasoning.id, message.id, call.id]
    assert added[1].content == []
    assert done[1] == message


def test_the_clients_own_reading_of_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="!say hm</think>Good day.") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Good day."


def test_calls_and_their_results_as_items(client: openai.OpenAI) -> None:
    first = create(client, f"hm</think>{PARIS}", tools=[TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "!say </think>It is sunny."}
    question = {"role": "user", "content": "how is it?"}
    answer = client.responses.create(model="fake", input=[question, *first.output, result], tools=[TOOL])
    assert answer.output_text == "It is sunny."
    kept = client.responses.create(model="fake", input=[result], previous_response_id=first.id, tools=[TOOL])
    assert kept.output_text == "It is sunny."
    assert kept.previous_response_id == first.id
    assert kept.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(kept.id).output_text == "It is sunny."
    client.responses.delete(kept.id)
    for gone in (kept.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(first.id)
    forgotten = create(client, "</think>x", store=False)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="fake", input="hi", previous_response_id=forgotten.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"instructions": "a", "input": [{"role": "user"}]}, "input[0].content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"n": 2}, "n"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = refused(http, RESPONSES, {"input": "hi", "max_output_tokens": 3} | fields)
    assert error["param"].removesuffix(".name") == param
    assert "messages" not in error["message"]


def test_sampling_fields_are_those_of_a_chat(http: httpx.Client) -> None:
    body = {"input": "hi", "top_k": 5, "seed": 7, "cache_salt": "x", "max_draft_tokens": 0}
    answer = http.post(RESPONSES, json=body | {"max_output_tokens": 5}).json()
    assert answer["output"][0]["content"][0]["text"] == answer_text(5)
    assert answer["seed"] == 7


def test_a_fault_in_mid_stream_is_an_error_event(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="could not go on"):
        list(client.responses.create(model="fake", input="!fail", max_output_tokens=50, stream=True))


def test_the_store_is_bounded_and_forgets_the_oldest() -> None:
    store = ResponseStore(200)
    for name in "abc":
        store.put({"id": name}, [{"text": "x" * 60}])
        assert store.num_bytes <= 200
    assert store.get("a") is None
    assert store.get("c") is not None
    store.put({"id": "d"}, [{"text": "x" * 300}])
    assert store.get("d") is None
    assert store.num_bytes == 0
    assert not store.drop("d")


def test_a_server_that_keeps_none_says_so() -> None:
    with LiveServer(ServerSettings(model="fake", max_stored_response_bytes=0)) as live, live.http() as http:
        answer = http.post(RESPONSES, json={"input": "hi", "max_output_tokens": 2}).json()
        assert answer["store"] is False
        assert http.get(f"{RESPONSES}/{answer['id']}").status_code == 404
        assert refused(http, RESPONSES, {"input": "hi", "store": True})["param"] == "store"
