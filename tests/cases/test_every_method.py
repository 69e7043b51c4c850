"""The cases that concern what is drawn, over HTTP, for every method that drafts: each answer is that of the same
request with drafting switched off, alone and among all others, and holds what its case asks for.

One server holds several methods; a request chooses among them (`speculative_config` in its body).
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.models.tokenizer import Tokenizer
from forerun.server.settings import ServerSettings
from forerun.spec.config import SpeculativeConfig
from tests.cases.conftest import POOL_TOKENS, Reference
from tests.cases.material import COMPLETIONS, DISTINCT, LOOP_TEXT, LOOPS, events, metric
from tests.cases.served import build_served
from tests.methods import WITH_FORMS, DraftModels
from tests.server.live import LiveServer

# Each set in one server; within a set every configuration has a method name of its own.
SETS: dict[str, tuple[str, ...]] = {
    "a": ("ngram", "suffix_cached", "ngram_mod", "draft_model", "eagle3", "eagle"),
    "b": ("suffix", "draft_model_coupled", "eagle3_tree", "eagle_tree"),
    "c": ("pard", "peagle", "grammar"),
    "d": ("draft_model_min_prob", "eagle3_coupled"),
    "e": ("draft_model_renamed", "eagle3_min_prob"),
}
TOGETHER = ("suffix_then_draft_model", "suffix_then_eagle3", "grammar_then_ngram")  # the sets hold their members
OFF = {"speculative_config": {"method": "none"}}
Choice = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A request, and what must hold of each choice of its answer."""

    name: str
    body: dict[str, Any]
    holds: Callable[[Choice], bool]


@pytest.fixture(scope="session")
def cases(ref: Reference, tokenizer: Tokenizer) -> list[Case]:
    greedy = ref(LOOPS[2], temperature=0, max_tokens=24, ignore_eos=True)
    ids = greedy.token_ids
    frequent = Counter(ids).most_common(1)[0][0]
    distinct = ref(DISTINCT[1], temperature=0, max_tokens=20, ignore_eos=True).token_ids
    other = next(i for i in range(3, 200) if i not in ids)
    said = (
        (p, i) for p in (*LOOPS, *DISTINCT) for i in ref(p, temperature=0, max_tokens=16, ignore_eos=True).token_ids
    )
    at, word = next((p, i) for p, i in said if tokenizer.encode(tokenizer.decode([i]).strip()) == [i])
    made = [
        *(Case(f"C02 {n} tokens", {"prompt": DISTINCT[0][:n]}, length_is(16)) for n in (1, 2, 3)),
        *(Case(f"C04 {n}", {"max_tokens": n, "logprobs": 0}, length_is(n)) for n in (1, 2, 3, 5, 8, 9, 17)),
        Case("C05", {"stop": [greedy.text[9:12], greedy.text[8:14]]}, lambda c: greedy.text[9:12] not in c["text"]),
        *(
            Case(f"C07 {n} at {t}", {"logprobs": n, "temperature": t, "seed": 3}, logprobs_are_sound)
            for n in (0, 1, 5)
            for t in (0, 0.8)
        ),
        Case("C08 forbidden", {"logit_bias": {str(frequent): -100}}, lambda c: frequent not in c["token_ids"]),
        Case("C08 forced", {"logit_bias": {str(other): 100}}, lambda c: set(c["token_ids"]) == {other}),
        *(Case(f"C08 min_p {s}", drawn(s, min_p=0.3, logprobs=5), likely(0.3)) for s in range(4)),
        *(
            Case(f"C10 {n}", stopped(DISTINCT[1], distinct[0], min_tokens=n), ends_after(n, distinct[0]))
            for n in (0, 1, 2, 5, 8)
        ),
        *(Case(f"C11 {s}", drawn(s), length_is(16)) for s in range(4)),
        Case("C11 top_k", drawn(5, top_k=3, logprobs=5), lambda c: length_is(16)(c) and logprobs_are_sound(c)),
        Case("C11 top_p", drawn(6, top_p=0.5), length_is(16)),
        Case("C13", stopped(DISTINCT[1], distinct[3]), lambda c: c["token_ids"] == distinct[:4]),
        Case("C20 greedy", {"n": 3}, lambda c: c["token_ids"] == ids[:16]),
        Case("C20 drawn", drawn(8, n=4), length_is(16)),
        Case("C22", {"prompt": LOOP_TEXT.decode("utf-8", "replace"), "max_tokens": 24}, length_is(24)),
        Case("presence", {"presence_penalty": 2.0}, length_is(16)),
        Case("frequency", drawn(9, frequency_penalty=1.5), length_is(16)),
        Case("repetition", {"repetition_penalty": 1.8}, lambda c: c["token_ids"] != ids[:16]),
        Case("allowed", {"allowed_token_ids": [other, frequent]}, lambda c: {*c["token_ids"]} <= {other, frequent}),
        Case("regex", drawn(10, structured_outputs={"regex": "[ab]{6}(cd){4}"}), fits("[ab]{6}(cd){4}")),
        Case("json", {"response_format": FORM, "max_tokens": 40, "ignore_eos": False}, is_person),
        Case(
            "bad_words", {"prompt": at, "bad_words": [tokenizer.decode([word])]}, lambda c: word not in c["token_ids"]
        ),
    ]
    assert len({case.name for case in made}) == len(made)
    plain: dict[str, Any] = {"prompt": LOOPS[2], "temperature": 0, "seed": 0, "max_tokens": 16, "ignore_eos": True}
    plain["return_token_ids"] = True
    return [Case(case.name, plain | case.body, case.holds) for case in made]


FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "adult": {"type": "boolean"}},
            "required": ["age", "adult"],
            "additionalProperties": False,
        },
    },
}


def is_person(choice: Choice) -> bool:
    """Whole, or so far: white space may be without end where weights are random."""
    if choice["finish_reason"] == "length":
        return choice["text"].lstrip().startswith("{")
    person = json.loads(choice["text"])
    return person.keys() == {"age", "adult"} and 0 <= person["age"] <= 99


def fits(pattern: str) -> Callable[[Choice], bool]:
    return lambda choice: re.fullmatch(pattern, choice["text"]) is not None


def drawn(seed: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": LOOPS[3], "temperature": 1.0, "seed": seed} | fields


def stopped(prompt: list[int], stop: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "stop_token_ids": [stop]} | fields


def length_is(number: int) -> Callable[[Choice], bool]:
    return lambda choice: len(choice["token_ids"]) == number and choice["finish_reason"] == "length"


def ends_after(number: int, stop: int) -> Callable[[Choice], bool]:
    """The stop id is not among the first so many tokens, and ends the text where it comes."""

    def holds(choice: Choice) -> bool:
        ids = choice["token_ids"]
        return stop not in ids[:number] and stop not in ids[:-1] and (number > 0 or ids == [stop])

    return holds


def logprobs_are_sound(choice: Choice) -> bool:
    """An entry a token, the token in it, none above 0 and not all alike."""
    logprobs = choice["logprobs"]
    entries = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
    return (
        len(entries) == len(choice["token_ids"])
        and all(top[token] == value <= 0 for token, value, top in entries)
        and len({value for _, value, _ in entries}) > 3
    )


def likely(share: float) -> Callable[[Choice], bool]:
    """Every token has at least this share of the likeliest one's probability, as the log-probabilities tell."""

    def holds(choice: Choice) -> bool:
        logprobs = choice["logprobs"]
        pairs = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        return all(2.718281828459045 ** (value - max(top.values())) >= share - 1e-6 for value, top in pairs)

    return holds


def choices(http: httpx.Client, body: dict[str, Any]) -> list[Choice]:
    response = http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    found: list[Choice] = response.json()["choices"]
    return found


class Servers:
    """A server a set, started when it is asked for first."""

    def __init__(self, model: Path, drafts: DraftModels, tokenizer: Tokenizer, folder: Path) -> None:
        self._model, self._drafts, self._tokenizer, self._folder = model, drafts, tokenizer, folder
        self._started: dict[str, LiveServer] = {}
        self.expected: dict[tuple[str, str], list[Choice]] = {}

    def __call__(self, name: str) -> LiveServer:
        if name not in self._started:
            spec = SpeculativeConfig.parse({"method": [WITH_FORMS[member](self._drafts) for member in SETS[name]]})
            server = LiveServer(
                ServerSettings(model="tiny"),
                partial(build_served, model=str(self._model), log=str(self._folder / f"{name}.log")),
                self._tokenizer,
                speculative_config=spec,
                kv_cache_memory_bytes=4 * POOL_TOKENS * 512,
                max_num_seqs=16,
                max_num_batched_tokens=96,
                num_threads=1,
            )
            self._started[name] = server.__enter__()
        return self._started[name]

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for server in self._started.values():
            server.__exit__()


@pytest.fixture(scope="module")
def servers(
    tiny_model: Path, draft_models: DraftModels, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    made = Servers(tiny_model, draft_models, tokenizer, tmp_path_factory.mktemp("every_method"))
    yield made
    made.stop()


def test_every_method_is_in_a_set() -> None:
    assert sorted(WITH_FORMS) == sorted([*TOGETHER, *(member for members in SETS.values() for member in members)])


@pytest.mark.parametrize(("server", "method"), [(s, m) for s, methods in SETS.items() for m in methods])
def test_answers_are_those_without_drafts(
    server: str, method: str, servers: Servers, cases: list[Case], draft_models: DraftModels
) -> None:
    live = servers(server)
    config = {"speculative_config": {"method": WITH_FORMS[method](draft_models)["method"]}}
    with live.http() as http:
        for case in cases:
            key = server, case.name
            if key not in servers.expected:
                servers.expected[key] = choices(http, case.body | OFF)
                assert all(case.holds(choice) for choice in servers.expected[key]), case.name
        drafted = metric(http, "vllm:spec_decode_num_draft_tokens_total")
        for case in cases:
            assert choices(http, case.body | config) == servers.expected[server, case.name], case.name
        assert metric(http, "vllm:spec_decode_num_draft_tokens_total") > drafted
        _assert_together(http, [(case, case.body | config) for case in cases], servers, server)
    assert_idle_but_for_memory(live)
    assert not any(word in servers.said(server) for word in ("ERROR", "CRITICAL", "Traceback"))


def _assert_together(
    http: httpx.Client, work: list[tuple[Case, dict[str, Any]]], servers: Servers, server: str
) -> None:
    """C14: all at once, in another order, streamed: texts and ids are the same."""
    random.Random(server).shuffle(work)
    with ThreadPoolExecutor(8) as pool:
        streams = pool.map(lambda item: streamed(http, item[1]), work)
        for (case, _), got in zip(work, streams, strict=True):
            expected = [(c["text"], c["token_ids"], c["finish_reason"]) for c in servers.expected[server, case.name]]
            assert got == expected, case.name


def streamed(http: httpx.Client, body: dict[str, Any]) -> list[tuple[str, list[int], str | None]]:
    """Text, ids and finish reason of each choice, joined from the events."""
    joined: dict[int, tuple[str, list[int], str | None]] = {}
    for chunk in events(http, COMPLETIONS, body):
        for choice in chunk["choices"]:
            text, ids, reason = joined.get(choice["index"], ("", [], None))
            joined[choice["index"]] = (
                text + choice["text"],
                ids + (choice["token_ids"] or []),
                choice["finish_reason"] or reason,
            )
    return [joined[index] for index in sorted(joined)]


def assert_idle_but_for_memory(server: LiveServer) -> None:
    """No block and no request is held; what methods remember of earlier answers on purpose may be there."""
    server.wait_until(lambda: server.client.stats().num_blocks_used == server.client.num_running == 0)
