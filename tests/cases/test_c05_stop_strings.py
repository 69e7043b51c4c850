"""C05: a stop string that ends inside an accepted run cuts text, ids and logprobs at the same token."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.engine.engine import Engine
from forerun.models.tokenizer import Tokenizer
from forerun.request import FinishReason, SamplingParams
from tests.cases.conftest import SELF_LENGTH, MakeEngine, Reference, Serve
from tests.cases.material import SMILEYS, complete, metric, prompt_of, stop_inside
from tests.cases.served import use_loop
from tests.tiny_engine import Result, run

WORDY = prompt_of(5)  # its greedy answer holds whole words early on
SMILEY_STOP = ":):):)"  # begins in token 0 and ends in token 3, which n-grams draft together with token 4
MAX_TOKENS = 24


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2, **fields)


def stops_of_wordy(tokenizer: Tokenizer, ref: Reference) -> tuple[int, str, str]:
    """(last token, stop, longer stop that holds it): the first draft holds tokens 1 to 8, the run goes on behind."""
    text = ref(WORDY, greedy())
    place, stop = stop_inside(tokenizer, text.token_ids, 1, SELF_LENGTH - 1)
    start = text.text.find(stop)
    longer = text.text[start - 1 : start + len(stop) + 1]
    return place + 1, stop, longer


def assert_cut(result: Result, expected: Result, last: int, text: str, stop: str) -> None:
    assert result.key == expected.key
    assert result.text == text
    assert result.last.finish_reason is FinishReason.STOP
    assert result.last.stop_reason == stop
    assert len(result.token_ids) == len(result.logprobs) == len(result.drafted) == last + 1
    assert [e.token_id for e in result.logprobs] == result.token_ids
    assert [(e.logprob, e.top) for e in result.logprobs] == [(e.logprob, e.top) for e in expected.logprobs]


@pytest.mark.parametrize("keep", [False, True], ids=["cut", "kept"])
def test_a_stop_string_between_two_accepted_tokens_ends_everything_there(
    keep: bool, engines: MakeEngine, ref: Reference, tokenizer: Tokenizer
) -> None:
    """C05 with S k=8: one stop string, and two of which the earlier is hidden inside the longer."""
    last, stop, longer = stops_of_wordy(tokenizer, ref)
    whole = ref(WORDY, greedy())
    text = whole.text[: whole.text.find(stop) + (len(stop) if keep else 0)]
    engine = engines("self", SELF_LENGTH)
    (unstopped,) = run(engine, [(WORDY, greedy())])
    assert unstopped.drafted[last - 1 : last + 2] == [True] * 3, "the run goes on behind the stop"
    for stops in [(stop,), (longer, stop), (stop, longer)]:
        fields = greedy(stop=stops, include_stop_str_in_output=keep)
        before = engine.stats()
        before = (before.generation_tokens, before.spec.num_accepted_tokens)
        (result,) = run(engine, [(WORDY, fields)])
        assert_cut(result, ref(WORDY, fields), last, text, stop)
        assert result.drafted[-1]
        assert engine.stats().generation_tokens - before[0] == last + 1
        assert engine.stats().spec.num_accepted_tokens - before[1] == sum(result.drafted)


@pytest.mark.parametrize("keep", [False, True], ids=["cut", "kept"])
def test_a_stop_string_inside_a_copied_run_ends_everything_there(
    keep: bool, engines: MakeEngine, ref: Reference
) -> None:
    """C05 with n-gram k=5 on a looping answer."""
    prompt, fields = prompt_of(*SMILEYS), greedy(stop=(SMILEY_STOP,), include_stop_str_in_output=keep)
    engine = engines("ngram", 5)
    (unstopped,) = run(engine, [(prompt, greedy())])
    assert unstopped.text.startswith("):):):):):")
    assert unstopped.drafted[3:5] == [True, True]
    (result,) = run(engine, [(prompt, fields)])
    assert_cut(result, ref(prompt, fields), 3, ")" + (SMILEY_STOP if keep else ""), SMILEY_STOP)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_every_place_of_a_stop_string_in_a_copied_sentence(
    method: str, k: int, engines: MakeEngine, tokenizer: Tokenizer
) -> None:
    """C05: every piece of three characters of a sentence said over and over, by a scripted target (a tiny random model
    does not say sentences). REF is the same engine without drafts for the request."""
    sentence = "the server drafts and the target keeps. "
    loop = tokenizer.encode(sentence)
    engine = engines(method, k)
    use_loop(engine, loop)
    stops = [(sentence * 2)[start : start + 3] for start in range(len(sentence))]
    for stop in stops:
        params = greedy(stop=(stop,))
        (expected,) = run(engine, [(loop, params)], max_draft_tokens=0)
        (result,) = run(engine, [(loop, params)])
        assert result.key == expected.key
        assert result.text == sentence[: (sentence * 2).find(stop)]
        assert len(result.logprobs) == len(result.token_ids)
        _assert_ends_with_stop(engine, result, stop)
    assert engine.stats().spec.num_accepted_tokens > 0


def _assert_ends_with_stop(engine: Engine, result: Result, stop: str) -> None:
    """The last token is the one that completes the stop string."""
    spelled = engine.outputs.tokenizer.decode
    assert stop in spelled(result.token_ids)
    assert stop not in spelled(result.token_ids[:-1])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("keep", [False, True], ids=["cut", "kept"])
def test_text_ids_logprobs_and_usage_end_at_the_same_token_over_http(
    keep: bool, stream: bool, serve: Serve, ref: Reference, tokenizer: Tokenizer
) -> None:
    """C05 over HTTP, S and n-gram: equal to the same request with drafting switched off, entry by entry."""
    last, stop, longer = stops_of_wordy(tokenizer, ref)
    for method, prompt, stops, count in (
        ("self", WORDY, [stop], last + 1),
        ("self", WORDY, [longer, stop], last + 1),
        ("ngram", prompt_of(*SMILEYS), [SMILEY_STOP], 4),
    ):
        body = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 2, "stop": stops, "stream": stream}
        with serve(method).http() as http:
            expected = complete(http, prompt, **body, include_stop_str_in_output=keep, max_draft_tokens=0)
            accepted = metric(http, "vllm:spec_decode_num_accepted_tokens_total")
            answer = complete(http, prompt, **body, include_stop_str_in_output=keep)
            assert metric(http, "vllm:spec_decode_num_accepted_tokens_total") > accepted
        assert answer == expected
        assert answer.stop_reason == stops[-1]
        assert len(answer.token_ids) == len(answer.token_logprobs) == answer.completion_tokens == count
        assert answer.text.endswith(stops[-1]) == keep
        assert (stops[-1] in answer.text) == keep
