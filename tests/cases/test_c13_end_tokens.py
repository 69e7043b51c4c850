"""C13: an end token in the middle of an accepted draft ends the text there, and nothing behind it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.request import FinishReason, SamplingParams
from tests.cases.conftest import SELF_LENGTH, MakeEngine, Reference, Serve
from tests.cases.material import DISTINCT, complete
from tests.tiny_engine import run, save_tiny_target

PROMPT = DISTINCT[1]
OPEN = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
END_AT = 3


@pytest.fixture
def text(ref: Reference) -> list[int]:
    ids = ref(PROMPT, OPEN).token_ids
    assert len(set(ids[:8])) == 8
    return ids


def target_that_ends_with(folder: Path, end_ids: list[int]) -> Path:
    """T with other end tokens in its config.json."""
    return save_tiny_target(folder / "target", eos_token_id=end_ids)


@pytest.mark.parametrize("as_end_token", [True, False], ids=["eos", "stop_token_ids"])
@pytest.mark.parametrize("method", [None, "self"])
def test_nothing_follows_an_end_token_inside_a_draft(
    method: str | None, as_end_token: bool, engines: MakeEngine, text: list[int], tmp_path: Path, tiny_model: Path
) -> None:
    """C13 a: r3 is the model's own end token, or a stop token id of the request."""
    end = text[END_AT]
    model = target_that_ends_with(tmp_path, [end]) if as_end_token else tiny_model
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=() if as_end_token else (end,), logprobs=1)
    plain = engines("self" if method else None, SELF_LENGTH)  # T itself, which is looked after
    engine = engines(method, SELF_LENGTH, model=model) if as_end_token else plain
    (result,) = run(engine, [(PROMPT, params)])
    assert result.token_ids == text[: END_AT + 1]
    assert len(result.logprobs) == END_AT + 1
    assert result.last.finish_reason is FinishReason.STOP
    assert result.last.stop_reason == (None if as_end_token else end)
    assert result.text == engine.outputs.tokenizer.decode(text[:END_AT])
    assert engine.stats().generation_tokens == END_AT + 1
    if method:
        assert result.drafted == [False, True, True, True], "the end token was drafted and accepted"
        assert result.last.metrics.speculative_decoding["num_accepted_draft_tokens"] == END_AT


@pytest.mark.parametrize("method", [None, "self"])
def test_ignore_eos_goes_on_to_max_tokens(
    method: str | None, engines: MakeEngine, text: list[int], tmp_path: Path
) -> None:
    """C13 b."""
    engine = engines(method, SELF_LENGTH, model=target_that_ends_with(tmp_path, [text[END_AT]]))
    (result,) = run(engine, [(PROMPT, OPEN)])
    assert result.token_ids == text
    assert result.last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("method", [None, "self"])
def test_the_first_of_two_end_tokens_ends_the_text(
    method: str | None, engines: MakeEngine, text: list[int], tmp_path: Path, tiny_model: Path
) -> None:
    """C13 c: both stand in one accepted run; also where the second one comes first in the list."""
    first, second = text[END_AT], text[END_AT + 2]
    engine = engines(method, SELF_LENGTH, model=target_that_ends_with(tmp_path, [second, first]))
    (result,) = run(engine, [(PROMPT, SamplingParams(temperature=0, max_tokens=20))])
    assert result.token_ids == text[: END_AT + 1]
    engine = engines(method, SELF_LENGTH)
    (result,) = run(engine, [(PROMPT, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(second, first)))])
    assert result.token_ids == text[: END_AT + 1]
    assert result.last.stop_reason == first


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_no_token_past_the_end_was_cached(
    block_size: int, engines: MakeEngine, ref: Reference, text: list[int]
) -> None:
    """C13, after a: a request that re-sends prompt and answer goes on as with an empty cache, and one that happens to
    go on with the very tokens that were drafted past the end finds none of them in the cache."""
    stop = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(text[END_AT],))
    engines_ = [engines("self", SELF_LENGTH, block_size=block_size, enable_prefix_caching=c) for c in (True, False)]
    for tail in (text[: END_AT + 1], text[:12]):
        prompt = PROMPT + tail
        for engine in engines_:
            run(engine, [(PROMPT, stop)])
            (again,) = run(engine, [(prompt, OPEN)])
            assert again.key == ref(prompt, OPEN).key
            engine.scheduler.target.drop_kept()
        fresh = engines_[0]
        run(fresh, [(PROMPT, stop)])
        assert len(fresh.scheduler.target._hash_of) == (len(PROMPT) + END_AT + 1) // block_size, "blocks published"
        (again,) = run(fresh, [(prompt, OPEN)])
        computed = min(len(PROMPT) + END_AT + 1, len(prompt) - 1)  # the last token of a prompt is always computed
        assert again.last.num_cached_tokens == computed // block_size * block_size
        fresh.scheduler.target.drop_kept()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_token_ids_and_ignore_eos_over_http(
    stream: bool, serve: Serve, ref: Reference, text: list[int], tiny_model: Path
) -> None:
    """C13 over HTTP with S k=8; the end token is one of the request's, since the server is shared."""
    with serve("self").http() as http:
        stops = [text[END_AT + 2], text[END_AT]]
        answer = complete(http, PROMPT, max_tokens=20, stop_token_ids=stops, logprobs=0, stream=stream)
        assert answer.token_ids == text[: END_AT + 1]
        assert len(answer.token_logprobs) == answer.completion_tokens == END_AT + 1
        assert (answer.finish_reason, answer.stop_reason) == ("stop", text[END_AT])
        again = PROMPT + answer.token_ids
        assert complete(http, again, max_tokens=20, ignore_eos=True).token_ids == ref(again, OPEN).token_ids
        answer = complete(http, PROMPT, max_tokens=20, ignore_eos=True, stream=stream)
        assert answer.token_ids == text
        assert answer.finish_reason == "length"
