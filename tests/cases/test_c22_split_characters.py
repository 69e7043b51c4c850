"""C22: characters that are split over tokens come out whole, streamed or not, wherever the chunks end.

A tiny random model says no emoji, so a scripted target stands in its place (`use_loop`): a token a byte, the same text
over and over, which n-grams copy. The server's core runs it too ("loop").
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.models.tokenizer import Tokenizer
from forerun.request import SamplingParams
from tests.cases.conftest import MakeEngine, Serve
from tests.cases.material import CHAT, LOOP_TEXT, complete, events
from tests.cases.served import byte_ids, use_loop
from tests.tiny_engine import run, save_tiny_target

EMOJI = LOOP_TEXT.index("\N{SLIGHTLY SMILING FACE}".encode())
FAMILY = LOOP_TEXT.index("\N{MAN}".encode())
ACCENT = LOOP_TEXT.index("\N{COMBINING ACUTE ACCENT}".encode())
KOREAN = LOOP_TEXT.index("\N{HANGUL SYLLABLE HAN}".encode())
INVALID = LOOP_TEXT.index(b"\xff")
CUTS = [EMOJI + 1, EMOJI + 2, EMOJI + 3, EMOJI + 4, FAMILY + 9, ACCENT + 1, KOREAN + 2, INVALID + 1, len(LOOP_TEXT) + 9]


def said(num_bytes: int) -> str:
    """What so many bytes are as text, by Python's own decoder."""
    return (LOOP_TEXT * 2)[:num_bytes].decode("utf-8", "replace")


@pytest.fixture(scope="module")
def loop(tokenizer: Tokenizer) -> list[int]:
    ids = byte_ids(tokenizer)
    return [ids[byte] for byte in LOOP_TEXT]


def test_the_text_holds_what_the_case_asks_for() -> None:
    """C22: whole characters, and U+FFFD only for the byte that is never valid and the character that is cut short."""
    assert LOOP_TEXT.decode("utf-8", "replace").count("\ufffd") == 2
    assert said(EMOJI + 4).endswith("\N{SLIGHTLY SMILING FACE}")
    assert [said(EMOJI + n)[EMOJI:] for n in (1, 2, 3)] == ["\ufffd"] * 3


@pytest.mark.parametrize("k", range(1, 7))
def test_every_length_of_the_text_joins_to_what_the_bytes_say(
    k: int, engines: MakeEngine, loop: list[int], tokenizer: Tokenizer
) -> None:
    """C22 in the engine: outputs joined are the bytes decoded at once, for every max_tokens; U+FFFD only where a byte
    is invalid or the text was cut. No output ends inside a character that the next one would go on with."""
    engine = engines("ngram", k)
    use_loop(engine, loop)
    limits = range(1, len(loop) + 8)
    work = [(loop, SamplingParams(temperature=0, max_tokens=limit)) for limit in limits]
    for limit, result in zip(limits, run(engine, work, check=False), strict=True):
        assert result.token_ids == (loop * 2)[:limit]
        assert result.text == said(limit) == tokenizer.decode(result.token_ids)
        for output in result.outputs[:-1]:
            assert output.text.count("\ufffd") <= 2, "only what is invalid"
    assert sum(result.drafted) > limit // 3, "much of it was copied"


@pytest.mark.parametrize("k", range(1, 7))
def test_joined_deltas_are_the_whole_text_over_http(k: int, serve: Serve, loop: list[int]) -> None:
    """C22 over HTTP, completions: stream true and false; `max_draft_tokens` moves the chunk border."""
    with serve("loop").http() as http:
        for cut in CUTS:
            whole = complete(http, loop, max_tokens=cut, max_draft_tokens=k)
            streamed = complete(http, loop, max_tokens=cut, max_draft_tokens=k, stream=True)
            assert streamed == whole
            assert whole.text == said(cut)


@pytest.mark.parametrize("k", [1, 4, 6])
def test_joined_chat_deltas_are_the_whole_text_over_http(k: int, serve: Serve) -> None:
    """C22 over HTTP, chat."""
    body = {"messages": [{"role": "user", "content": "x" * 30}], "temperature": 0, "max_draft_tokens": k}
    with serve("loop").http() as http:
        for cut in (40, len(LOOP_TEXT) * 2):
            (choice,) = http.post(CHAT, json=body | {"max_tokens": cut}).json()["choices"]
            deltas = [
                c["choices"][0]["delta"].get("content", "") for c in events(http, CHAT, body | {"max_tokens": cut})
            ]
            assert "".join(deltas) == choice["message"]["content"]
            assert "\N{SLIGHTLY SMILING FACE}" in choice["message"]["content"]
            assert not any("\ufffd" in delta for delta in deltas if delta.isascii())


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    return save_tiny_target(tmp_path / "long", max_position_embeddings=2048)


@pytest.mark.parametrize("method", [None, "ngram"])
def test_invalid_bytes_in_a_row_cost_no_more_the_more_there_are(
    method: str | None, engines: MakeEngine, tokenizer: Tokenizer, long_model: Path
) -> None:
    """C22: 500 invalid bytes in a row; the second half takes at most three times the first, in processor time."""
    engine = engines(method, model=long_model)
    use_loop(engine, [byte_ids(tokenizer)[0xFF]])
    halves = [_halves(engine) for _ in range(3)]
    assert min(second / first for first, second in halves) <= 3


def _halves(engine: Engine) -> tuple[float, float]:
    """Seconds of processor time that the first and the second 250 tokens take."""
    engine.add_request(NewRequest("r", [5], SamplingParams(temperature=0, max_tokens=500), 0))
    text = ""
    started = time.process_time()
    middle = 0.0
    while engine.has_work:
        for output in engine.step().outputs:
            text += output.text
        if len(text) >= 250 and not middle:
            middle = time.process_time()
    assert text == "\ufffd" * 500
    return middle - started, time.process_time() - middle
