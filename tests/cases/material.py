"""Prompts of the cases, frozen, and what an HTTP answer says."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from forerun.models.tokenizer import Tokenizer
from tests.tiny_tokenizer import VOCAB_SIZE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# Seeds of 8-token prompts whose greedy answer begins with 8 different ids, none of which is in the prompt.
DISTINCT_SEEDS = (5, 7, 8, 12, 24, 58)
# Prompts (seed, length of the unit, repeats) whose greedy answer loops, so that n-grams have something to copy.
LOOPING = ((20, 8, 1), (130, 8, 1), (51, 6, 4), (356, 6, 4), (378, 6, 4), (532, 6, 4))
# The greedy answer begins "):):):):):1": a stop string may end inside the copied run.
SMILEYS = (434, 6, 4)

LOOP_TEXT = (
    "ok \N{SLIGHTLY SMILING FACE} "
    "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL} "
    "e\N{COMBINING ACUTE ACCENT} \N{HANGUL SYLLABLE HAN}\N{HANGUL SYLLABLE GUG} "
).encode() + b"\xff lone \xf0\x9f cut "
"""An emoji, a family with joiners, an accent, Korean, a byte that is never valid, a character cut short."""


def prompt_of(seed: int, length: int = 8, repeats: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] * repeats


DISTINCT = [prompt_of(seed) for seed in DISTINCT_SEEDS]
LOOPS = [prompt_of(*loop) for loop in LOOPING]


@dataclass
class Answer:
    """One choice of an answer, whole or joined from a stream: what must not depend on speculation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_tokens: int | None = None

    def add(self, choice: dict[str, Any]) -> None:
        self.text += choice["text"]
        self.token_ids += choice["token_ids"]
        if logprobs := choice["logprobs"]:
            self.tokens += logprobs["tokens"]
            self.token_logprobs += logprobs["token_logprobs"]
            self.top_logprobs += logprobs["top_logprobs"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.stop_reason = choice.get("stop_reason") or self.stop_reason


def complete(http: httpx.Client, prompt: Any, *, stream: bool = False, **body: Any) -> Answer:
    """POST /v1/completions with one prompt, as one object or as a stream; the two give equal answers."""
    body = {"prompt": prompt, "temperature": 0, "return_token_ids": True} | body
    answer = Answer()
    if not stream:
        response = http.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        content = response.json()
        (choice,) = content["choices"]
        answer.add(choice)
        answer.completion_tokens = content["usage"]["completion_tokens"]
        return answer
    for chunk in events(http, COMPLETIONS, body | {"stream_options": {"include_usage": True}}):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            answer.add(choice)
        if chunk["usage"] is not None:
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
    return answer


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def metric(http: httpx.Client, name: str) -> float:
    """The sum over the series of this name in /metrics, which holds no NaN."""
    text = http.get("/metrics").text
    assert "nan" not in text.lower()
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    assert lines, f"no series {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def stop_inside(tokenizer: Tokenizer, token_ids: Sequence[int], first: int, last: int) -> tuple[int, str]:
    """(i, stop): a string that begins in the middle of token i and ends in the middle of token i + 1, and stands
    nowhere before; i is in [first, last)."""
    spelled = [tokenizer.token_bytes(token_id).decode("ascii", "ignore") for token_id in token_ids]
    for i in range(first, last):
        one, two = spelled[i], spelled[i + 1]
        stop = one[len(one) // 2 :] + two[: len(two) // 2]
        whole = tokenizer.decode(token_ids)
        if min(len(one), len(two)) >= 2 and whole.find(stop) == len(tokenizer.decode(token_ids[:i])) + len(one) // 2:
            return i, stop
    raise AssertionError("no such stop string: freeze another prompt")
