"""What answers look like, in one piece and as streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import NUM_SPEC_TOKENS, answer_text
from tests.server.live import LiveServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, whose framing is checked."""
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    events = response.text.split("\n\n")[:-1]
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_completion(http: httpx.Client) -> None:
    answer = post(http, COMPLETIONS, prompt="hello", max_tokens=10, seed=5)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 10,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["choices"] == [
        {
            "index": 0,
            "text": answer_text(10),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "seed": 5,
        }
    ]


def test_a_completion_has_16_tokens_if_nothing_is_said_and_chat_goes_on(http: httpx.Client) -> None:
    assert post(http, COMPLETIONS, prompt="hello")["usage"]["completion_tokens"] == 16
    usage = post(http, CHAT, messages=HELLO)["usage"]
    assert usage["total_tokens"] == 512


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_all_forms_of_a_prompt_mean_the_same(http: httpx.Client, prompt: Any) -> None:
    answer = post(http, COMPLETIONS, prompt=prompt, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == [97, 98]
    assert "".join(map(chr, answer["choices"][0]["token_ids"])) == answer_text(16)


@pytest.mark.parametrize("prompts", [["a", "bb", "ccc"], [[97], [98, 98], [99] * 3]])
def test_several_prompts_give_several_choices_in_order(http: httpx.Client, prompts: Any) -> None:
    answer = post(http, COMPLETIONS, prompt=prompts, max_tokens=5, return_token_ids=True)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert [len(c["prompt_token_ids"]) for c in answer["choices"]] == [1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["usage"]["prompt_tokens"] == 6
    assert "metrics" not in answer
    chunks = stream(http, COMPLETIONS, prompt=prompts, max_tokens=5)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [answer_text(5)] * 3


def test_seeds_are_returned_and_drawn_for_each_prompt(http: httpx.Client) -> None:
    drawn = [c["seed"] for c in post(http, COMPLETIONS, prompt=["a", "a"])["choices"]]
    assert drawn[0] != drawn[1]
    many = [c["seed"] for c in post(http, COMPLETIONS, prompt=["a"] * 64, max_tokens=1)["choices"]]
    assert max(many) < 2**53  # JavaScript's numbers hold them
    assert max(many) > 2**46
    assert [c["seed"] for c in post(http, COMPLETIONS, prompt=["a", "a"], seed=3)["choices"]] == [3, 3]
    assert post(http, COMPLETIONS, prompt="a", seed=-1)["choices"][0]["seed"] == -1
    assert post(http, COMPLETIONS, prompt="a", seed=2**64 - 1)["choices"][0]["seed"] == 2**64 - 1
    assert stream(http, COMPLETIONS, prompt="a", seed=9)[-1]["choices"][0]["seed"] == 9


def test_a_chat_answer(http: httpx.Client) -> None:
    answer = post(http, CHAT, messages=HELLO, max_tokens=10)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": answer_text(10), "refusal": None}
    assert choice["finish_reason"] == "length"


def test_chat_messages_go_through_the_template(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = post(http, CHAT, messages=[{"role": "user", "content": parts}], return_token_ids=True, max_tokens=1)
    assert bytes(answer["prompt_token_ids"]) == b"one\ntwo|user\nassistant:"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    answer = post(http, CHAT, messages=HELLO, return_token_ids=True, max_tokens=1, **options)
    assert bytes(answer["prompt_token_ids"]) == b"hello|user\n"
    answer = post(http, CHAT, messages=[{"role": "user", "content": ""}], max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1


def test_a_chat_stream_begins_with_the_role_and_joins_to_the_answer(http: httpx.Client) -> None:
    chunks = stream(http, CHAT, messages=HELLO, max_tokens=20)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)
    assert len({c["id"] for c in chunks}) == 1
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == answer_text(20)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in c for c in chunks)
    assert len(chunks) == 1 + 7  # 3 tokens a step


def test_a_completion_stream_joins_to_the_answer(http: httpx.Client) -> None:
    chunks = stream(http, COMPLETIONS, prompt="hello", max_tokens=20, return_token_ids=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == answer_text(20)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list(b"hello")
    assert bytes(i for c in chunks for i in c["choices"][0]["token_ids"]).decode() == answer_text(20)


@pytest.mark.parametrize(("path", "what"), [(COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": HELLO})])
def test_usage_comes_last_when_asked_for(http: httpx.Client, path: str, what: dict[str, Any]) -> None:
    chunks = stream(http, path, **what, max_tokens=7, stream_options={"include_usage": True})
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 7
    assert all(c["usage"] is None for c in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in stream(http, path, **what, max_tokens=7, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == 7


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("prompt", ["hello", "!hold"])
def test_completion_logprobs_have_an_entry_a_token(
    http: httpx.Client, streaming: bool, num_top: int, prompt: str
) -> None:
    if streaming:
        chunks = stream(http, COMPLETIONS, prompt=prompt, max_tokens=8, logprobs=num_top)
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        found = {key: [item for part in parts for item in part[key]] for key in parts[0]}
    else:
        found = post(http, COMPLETIONS, prompt=prompt, max_tokens=8, logprobs=num_top)["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == answer_text(8)
    assert found["token_logprobs"] == [-0.25] * 8
    assert found["text_offset"] == list(range(8))
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert top == {token: -0.25} | {chr(ord("A") + i): -0.5 - i for i in range(num_top)}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_chat_logprobs_have_an_entry_a_token(http: httpx.Client, streaming: bool, num_top: int | None) -> None:
    asked = {"messages": HELLO, "max_tokens": 8, "logprobs": True, "top_logprobs": num_top}
    if streaming:
        choices = [c["choices"][0] for c in stream(http, CHAT, **asked)]
        entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    else:
        entries = post(http, CHAT, **asked)["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in entries] == list(answer_text(8))
    assert entries[0]["bytes"] == [ord("a")]
    assert all(len(e["top_logprobs"]) == (num_top or 0) for e in entries)
    assert all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} for e in entries)


def test_text_that_is_held_back_makes_no_empty_chunk(http: httpx.Client) -> None:
    chunks = stream(http, COMPLETIONS, prompt="!hold", max_tokens=9)
    assert "".join(c["choices"][0]["text"] for c in chunks) == answer_text(9)
    assert all(c["choices"][0]["text"] for c in chunks)


def test_metrics_of_a_request_in_the_answer_and_on_the_usage_chunk(http: httpx.Client) -> None:
    answer = post(http, COMPLETIONS, prompt="hello", max_tokens=10)["metrics"]
    assert answer["time_to_first_token_ms"] == pytest.approx(2.0)
    assert answer["generation_time_ms"] == pytest.approx(3.0)
    assert answer["queue_time_ms"] == pytest.approx(1.0)
    assert answer["mean_itl_ms"] == pytest.approx(3.0 / 9)
    assert answer["tokens_per_second"] == pytest.approx(10 / 0.005)
    spec = answer["speculative_decoding"]
    assert spec["num_spec_tokens"] == NUM_SPEC_TOKENS
    assert len(spec["acceptance_histogram"]) == NUM_SPEC_TOKENS + 1
    assert len(spec["per_step_accepted"]) == spec["num_spec_steps"] == 3
    last = stream(http, CHAT, messages=HELLO, max_tokens=10, stream_options={"include_usage": True})[-1]
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_metrics_of_several_choices_stand_in_each(http: httpx.Client, streaming: bool) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 10, "n": 2}
    if streaming:
        chunks = stream(http, CHAT, **asked, stream_options={"include_usage": True})
        assert "metrics" not in chunks[-1]
        choices = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert not [c for chunk in chunks for c in chunk["choices"] if not c["finish_reason"] and "metrics" in c]
    else:
        answer = post(http, CHAT, **asked)
        assert "metrics" not in answer
        choices = answer["choices"]
    assert sorted(c["index"] for c in choices) == [0, 1]
    for choice in choices:
        assert choice["metrics"]["generation_time_ms"] == pytest.approx(3.0)
        assert choice["metrics"]["speculative_decoding"]["num_spec_steps"] == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_choices_are_numbered_prompt_by_prompt_and_share_the_prompt_and_its_seed(
    http: httpx.Client, streaming: bool
) -> None:
    asked: dict[str, Any] = {"prompt": ["a", "bb"], "n": 3, "max_tokens": 4, "return_token_ids": True}
    if streaming:
        *chunks, last = stream(http, COMPLETIONS, **asked, stream_options={"include_usage": True})
        given = [c for chunk in chunks for c in chunk["choices"]]
        prompt_of = {c["index"]: c["prompt_token_ids"] for c in given if "prompt_token_ids" in c}
        seed_of = {c["index"]: c["seed"] for c in given if c["finish_reason"]}
    else:
        last = post(http, COMPLETIONS, **asked)
        prompt_of = {c["index"]: c["prompt_token_ids"] for c in last["choices"]}
        seed_of = {c["index"]: c["seed"] for c in last["choices"]}
    assert [bytes(prompt_of[i]).decode() for i in range(6)] == ["a"] * 3 + ["bb"] * 3
    assert len({seed_of[i] for i in range(3)}) == len({seed_of[i] for i in range(3, 6)}) == 1
    assert seed_of[0] != seed_of[3]
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["completion_tokens"] == 24


def test_the_limit_of_n_and_best_of_where_it_asks_for_nothing(http: httpx.Client) -> None:
    assert len(post(http, COMPLETIONS, prompt="a", n=128, max_tokens=1)["choices"]) == 128
    assert len(post(http, COMPLETIONS, prompt="a", n=2, best_of=2, max_tokens=1)["choices"]) == 2


def test_a_request_id_may_be_given_in_body_or_header(http: httpx.Client) -> None:
    assert post(http, COMPLETIONS, prompt="a", request_id="mine")["id"] == "cmpl-mine"
    response = http.post(CHAT, json={"messages": HELLO}, headers={"X-Request-Id": "theirs"})
    assert response.json()["id"] == "chatcmpl-theirs"


def test_a_request_id_of_a_running_request_may_be_given_again(slow_server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 200, "stream": True}
    headers = {"X-Request-Id": "same"}
    with (
        slow_server.http(headers=headers) as http,
        http.stream("POST", COMPLETIONS, json=body) as first,
        http.stream("POST", COMPLETIONS, json=body | {"max_tokens": 3}) as second,
    ):
        assert first.status_code == second.status_code == 200
        assert '"id":"cmpl-same"' in second.read().decode()
        assert '"id":"cmpl-same"' in next(first.iter_lines())


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
def test_an_echo_comes_before_the_text(http: httpx.Client, prompt: Any) -> None:
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 5, "n": 2, "echo": True}
    assert [c["text"] for c in post(http, COMPLETIONS, **asked)["choices"]] == ["hello" + answer_text(5)] * 2
    texts = ["", ""]
    for choice in (choice for chunk in stream(http, COMPLETIONS, **asked) for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["hello" + answer_text(5)] * 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_chunks_wait_for_the_interval_but_for_the_first_and_the_last(http: httpx.Client, path: str) -> None:
    what: dict[str, Any] = {"prompt": "hello"} if path == COMPLETIONS else {"messages": HELLO}
    asked = what | {"max_tokens": 20, "stream_interval": 7, "n": 2, "return_token_ids": True}
    sizes: list[list[int]] = [[], []]
    for choice in (choice for chunk in stream(http, path, **asked) for choice in chunk["choices"]):
        sizes[choice["index"]] += [len(choice["token_ids"])] if choice.get("token_ids") else []
    assert sizes == [[3, 9, 8]] * 2  # 3 tokens a step


def test_tokens_may_be_named_by_their_ids(http: httpx.Client) -> None:
    ids = [f"token_id:{ord(letter)}" for letter in answer_text(4)]
    asked: dict[str, Any] = {"max_tokens": 4, "return_tokens_as_token_ids": True}
    found = post(http, COMPLETIONS, prompt="hello", logprobs=1, **asked)["choices"][0]["logprobs"]
    assert found["tokens"] == ids
    assert found["text_offset"] == [0, 1, 2, 3]
    assert found["top_logprobs"][0].keys() == {ids[0], f"token_id:{ord('A')}"}
    found = post(http, CHAT, messages=HELLO, logprobs=True, top_logprobs=1, **asked)["choices"][0]["logprobs"]
    assert [entry["token"] for entry in found["content"]] == ids
    assert found["content"][0]["bytes"] == [ord("a")]


def test_a_fault_in_mid_stream_is_an_error_event(http: httpx.Client) -> None:
    chunks = stream(http, COMPLETIONS, prompt="!fail", max_tokens=50)
    assert chunks[0]["choices"][0]["text"] == answer_text(3)
    assert chunks[-1]["error"]["code"] == 500
    assert "/the/logits" not in json.dumps(chunks)
