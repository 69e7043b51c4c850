"""C14: requests of every kind in one batch, each as if it were alone, and speculation goes on for the others."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from forerun.engine.messages import NewRequest
from forerun.request import SamplingParams
from tests.cases.conftest import MakeEngine, Reference, Serve
from tests.cases.material import COMPLETIONS, DISTINCT, LOOPS, complete, metric
from tests.tiny_engine import Result, finish, run

SHORT, LONG = 1, 24
GREEDY = SamplingParams(temperature=0, max_tokens=LONG)
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
OBJECT = {"type": "object", "properties": {"target": {"type": "integer"}, "server": {"enum": ["draft", "user"]}}}
SCHEMA = OBJECT | {"required": ["target", "server"], "additionalProperties": False}
FORM = {"json": SCHEMA, "disable_any_whitespace": True}
# (prompt, parameters, most drafted tokens)
KINDS: dict[str, tuple[list[int], SamplingParams, int | None]] = {
    "greedy": (LOOPS[3], GREEDY, None),
    "seeded": (LOOPS[4], SamplingParams(temperature=1.0, seed=7, max_tokens=LONG), None),
    "no_speculation": (LOOPS[3], GREEDY, 0),
    "one_token_prompt": (DISTINCT[0][:1], GREEDY, None),
    "one_token_answer": (LOOPS[2], SamplingParams(temperature=0, max_tokens=SHORT), None),
    "logprobs": (LOOPS[5], SamplingParams(temperature=0, max_tokens=LONG, logprobs=3), None),
    "stop_string": (LOOPS[0], SamplingParams(temperature=0, max_tokens=LONG, stop=("ep",)), None),
    "penalty": (LOOPS[3], SamplingParams(temperature=0, max_tokens=LONG, **PENALTIES), None),
    "schema": (LOOPS[5], SamplingParams(temperature=0, max_tokens=LONG, structured_outputs=FORM), None),
    "top_p": (DISTINCT[1], SamplingParams(temperature=0.7, top_p=0.9, seed=9, max_tokens=LONG), None),
}


@pytest.mark.parametrize(("method", "k"), [("ngram", 5), ("suffix", 8), ("self", 4)])
def test_no_request_changes_another_in_any_order_of_arrival(
    method: str, k: int, engines: MakeEngine, ref: Reference
) -> None:
    """C14 in the engine: 10 shuffled orders, the second half of the requests arriving a few steps late."""
    engine = engines(method, k)
    rng = random.Random(0)
    names = list(KINDS)
    for round_ in range(10):
        rng.shuffle(names)
        before = engine.stats().spec.num_draft_tokens
        results = {name: Result() for name in names}
        for place, name in enumerate(names):
            prompt, params, most = KINDS[name]
            engine.add_request(NewRequest(name, list(prompt), params, params.seed or 0, max_draft_tokens=most))
            if place == 3:
                for _ in range(round_ % 4):
                    for output in engine.step().outputs:
                        results[output.request_id].add(output)
        finish(engine, results)
        for name, result in results.items():
            prompt, params, _ = KINDS[name]
            expected = ref(prompt, params)
            assert result.key == expected.key, name
            assert result.logprobs == expected.logprobs
        assert not any(results["no_speculation"].drafted)
        assert engine.stats().spec.num_draft_tokens > before
        assert results["greedy"].last.metrics.speculative_decoding["num_draft_tokens"] > 0


def test_four_equal_requests_accept_everything_whatever_their_row(engines: MakeEngine, ref: Reference) -> None:
    """C14: under S no row is worse than another (elsewhere only slot 0 got drafts of its own)."""
    engine = engines("self", 4)
    params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    for result in run(engine, [(DISTINCT[2], params)] * 4):
        assert result.key == ref(DISTINCT[2], params).key
        spec = result.last.metrics.speculative_decoding
        assert spec["num_accepted_draft_tokens"] == spec["num_draft_tokens"] > 15
        assert spec["draft_acceptance_rate"] == 1.0


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": LOOPS[3]},
    "seeded": {"prompt": LOOPS[4], "temperature": 1.0, "seed": 7},
    "no_speculation": {"prompt": LOOPS[3], "max_draft_tokens": 0},
    "one_token_prompt": {"prompt": DISTINCT[0][:1]},
    "one_token_answer": {"prompt": LOOPS[2], "max_tokens": 1},
    "logprobs": {"prompt": LOOPS[5], "logprobs": 3},
    "penalty": {"prompt": LOOPS[3], **PENALTIES},
    "response_format": {
        "prompt": LOOPS[3],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "priority": {"prompt": LOOPS[3], "priority": 1},
}


@pytest.mark.parametrize("method", ["ngram", "self"])
def test_requests_at_once_and_the_one_that_is_not_served_disturb_nobody(method: str, serve: Serve) -> None:
    """C14 over HTTP: what is not served is refused by name, for that request only."""
    server = serve(method)
    with server.http() as http:
        alone = {name: complete(http, **({"max_tokens": LONG} | body)) for name, body in BODIES.items()}
        drafted = metric(http, "vllm:spec_decode_num_draft_tokens_total")
        barrier = threading.Barrier(len(BODIES) + len(REFUSED))

        def served(name: str, stream: bool) -> Any:
            barrier.wait(20)
            return complete(http, stream=stream, **({"max_tokens": LONG} | BODIES[name]))

        def refused(name: str) -> httpx.Response:
            barrier.wait(20)
            return http.post(COMPLETIONS, json={"max_tokens": LONG} | REFUSED[name])

        for round_ in range(3):
            with ThreadPoolExecutor(barrier.parties) as pool:
                answers = {name: pool.submit(served, name, i % 2 == round_ % 2) for i, name in enumerate(BODIES)}
                refusals = {name: pool.submit(refused, name) for name in REFUSED}
            assert {name: answer.result() for name, answer in answers.items()} == alone
            for name, refusal in refusals.items():
                response = refusal.result()
                assert response.status_code == 400
                assert response.json()["error"]["param"] == name
                assert name in response.json()["error"]["message"]
        assert metric(http, "vllm:spec_decode_num_draft_tokens_total") > drafted
