"""Joined deltas equal the whole text, and a text ends exactly where it should."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from forerun.engine.detokenizer import Detokenizer
from forerun.models.tokenizer import Spelling, Tokenizer, load_tokenizer
from forerun.request import FinishReason, SamplingParams
from tests.tiny_tokenizer import IM_END, VOCAB_SIZE, save_tiny_tokenizer, tiny_backend

ABSENT_ID = 100_000  # a row of a padded output head


def _wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"))


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    words = [
        "<|im_end|>",
        "<unk>",
        "\u2581",
        "\u2581\u2581",
        "\u2581Hello",
        "Hello",
        "lo",
        "\u2581world",
        "é",
        "😀",
        "!",
    ]
    vocab = {token: i for i, token in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=False, special=True)])
    return _wrap(backend)


def _llama_decoder() -> decoders.Decoder:
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


BYTE_LEVEL = _wrap(tiny_backend())
SENTENCEPIECE = {
    "llama": _sentencepiece(_llama_decoder()),
    "gemma": _sentencepiece(
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "metaspace": _sentencepiece(decoders.Metaspace()),
    "metaspace, never": _sentencepiece(decoders.Metaspace(prepend_scheme="never")),
}


def _chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    borders = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [list(ids[a:b]) for a, b in itertools.pairwise(borders)]


def _stream(
    detokenizer: Detokenizer, chunks: list[list[int]]
) -> tuple[str, int, FinishReason | None, int | str | None]:
    """The joined text, how many ids were kept, and why it ended."""
    text, kept = "", 0
    for chunk in chunks:
        judgement = detokenizer.push(chunk)
        text += judgement.text
        kept += judgement.num_tokens
        if judgement.finish_reason is not None:
            assert detokenizer.finish() == ""
            return text, kept, judgement.finish_reason, judgement.stop_reason
        assert judgement.num_tokens == len(chunk)
    return text + detokenizer.finish(), kept, None, None


def _ids(text: str) -> list[int]:
    """One id a byte, so that characters are split over tokens."""
    return [_byte_id(byte) for byte in text.encode()]


def _byte_id(byte: int) -> int:
    return next(i for i in range(3, 259) if BYTE_LEVEL.token_bytes(i) == bytes([byte]))


token_ids = st.lists(st.one_of(st.integers(0, VOCAB_SIZE - 1), st.just(ABSENT_ID)), max_size=40)
cut_points = st.lists(st.integers(0, 40), max_size=6)


@given(token_ids, cut_points, st.booleans())
def test_joined_deltas_equal_the_whole_text_byte_level(ids: list[int], cuts: list[int], skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    text, kept, _, _ = _stream(Detokenizer(BYTE_LEVEL, params, ()), _chunks(ids, cuts))
    assert kept == len(ids)
    assert text == BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL.backend_decode(ids, skip)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@given(st.lists(st.integers(0, 12 + 256), max_size=30), cut_points, st.booleans())
def test_joined_deltas_equal_the_whole_text_sentencepiece(
    kind: str, ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = SENTENCEPIECE[kind]
    assert tokenizer.spelling is Spelling.SENTENCEPIECE
    params = SamplingParams(skip_special_tokens=skip)
    text, _, _, _ = _stream(Detokenizer(tokenizer, params, ()), _chunks(ids, cuts))
    assert text == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@given(st.lists(st.sampled_from(["w2", "w3", "w4", "w5", "w6", "w7", "w8", "w9", "w0", "é", "😀"]), max_size=12))
def test_sentencepiece_text_equals_the_backends_where_its_bytes_are_characters(kind: str, pieces: list[str]) -> None:
    tokenizer = SENTENCEPIECE[kind]
    ids: list[int] = []
    for piece in pieces:
        ids += [int(piece[1:])] if piece[0] == "w" else [11 + byte for byte in piece.encode()]
    if not kind.startswith("metaspace"):  # Metaspace alone shows <0xNN> as it stands, and so do we
        assert all(tokenizer.token_bytes(11 + byte) == bytes([byte]) for byte in (0, 255))
    for skip in (False, True):
        assert tokenizer.decode(ids, skip) == tokenizer.backend_decode(ids, skip)


def test_text_that_goes_on_after_a_prompt_keeps_its_leading_space() -> None:
    tokenizer = SENTENCEPIECE["llama"]
    ids = [4, 7]  # " Hello", " world"
    assert _stream(Detokenizer(tokenizer, SamplingParams(), ()), [ids])[0] == "Hello world"
    assert _stream(Detokenizer(tokenizer, SamplingParams(), (), strip_leading=False), [ids])[0] == " Hello world"


def test_other_decoders_are_asked_through_a_window() -> None:
    vocab = {token: i for i, token in enumerate(["[UNK]", "draft", "##ing", "pays", "##.", "a", "<|im_end|>"])}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = _wrap(backend)
    assert tokenizer.spelling is Spelling.OTHER
    ids = [1, 2, 3, 4, 5, 1, 3, 2, 2, 5]
    expected = tokenizer.decode(ids)
    assert expected.startswith("drafting pays. a draft")
    assert _stream(Detokenizer(tokenizer, SamplingParams(), ()), [[i] for i in ids])[0] == expected


@pytest.mark.parametrize("spaced", [True, False])
def test_a_space_between_special_tokens_may_be_left_out(spaced: bool) -> None:
    """Where the decoder writes one: between them only, as vLLM has it."""
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["<|x|>", "<|y|>"])
    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaced)
    text = _stream(Detokenizer(_wrap(backend), params, ()), [[1], [2], [3], [1], [2]])[0]
    assert text == ("a <|x|> <|y|> a <|x|>" if spaced else "a <|x|><|y|> a <|x|>")


def test_a_stop_string_counts_from_the_token_after_min_tokens_on() -> None:
    """It may begin before; what ends before is passed over, whole or in overlaps."""
    for min_tokens, expected in ((0, ""), (2, "a"), (3, "aa"), (4, "aaa"), (9, "aaaaa")):
        params = SamplingParams(stop=("aa",), min_tokens=min_tokens)
        judged = Detokenizer(BYTE_LEVEL, params, ()).push(_ids("aaaaa"))
        assert (judged.text if judged.finish_reason else "aaaaa") == expected


@pytest.mark.parametrize("chunk", range(1, 7))
def test_c22_characters_split_over_tokens_come_out_whole(chunk: int) -> None:
    text = "a👍 👨‍👩‍👧 e\u0301 한국어 é."
    ids = _ids(text)
    deltas = []
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(), ())
    for start in range(0, len(ids), chunk):
        deltas.append(detokenizer.push(ids[start : start + chunk]).text)
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_c22_a_character_cut_by_the_length_becomes_one_replacement_character(num_bytes: int) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(), ())
    assert detokenizer.push(_ids("ok 👍")[: 3 + num_bytes]).text == "ok "
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("stop", [(), ("\ufffd" * 64 + "end",)], ids=["no stop", "a stop string that nearly matches"])
def test_c22_invalid_bytes_take_linear_time(stop: tuple[str, ...]) -> None:
    def seconds(count: int) -> float:
        detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=stop), ())
        started = time.perf_counter()
        for _ in range(count):
            detokenizer.push([bad])
        detokenizer.finish()
        return time.perf_counter() - started

    bad = _byte_id(0xFF)
    assert _stream(Detokenizer(BYTE_LEVEL, SamplingParams(), ()), [[bad]] * 500)[0] == "\ufffd" * 500
    small = min(seconds(5_000) for _ in range(3))
    assert min(seconds(50_000) for _ in range(2)) < 30 * small  # 10 times the bytes; quadratic would be 100


# ---- where a text ends --------------------------------------------------------------------------------------------


def _run(ids: list[int], cuts: Sequence[int] = (), eos: Sequence[int] = (), **fields: object) -> tuple[object, ...]:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return _stream(Detokenizer(BYTE_LEVEL, params, eos), _chunks(ids, cuts))


def test_c13_the_end_token_is_kept_and_its_text_is_not() -> None:
    ids = [*_ids("ab"), IM_END, *_ids("cd")]
    for skip in (True, False):
        assert _run(ids, eos=[IM_END], skip_special_tokens=skip) == ("ab", 3, FinishReason.STOP, None)


def test_c13_ignore_eos_goes_on_but_stop_token_ids_still_count() -> None:
    ids = [*_ids("ab"), IM_END, *_ids("cd")]
    assert _run(ids, eos=[IM_END], ignore_eos=True) == ("abcd", 5, None, None)
    assert _run(ids, eos=[IM_END], ignore_eos=True, stop_token_ids=(IM_END,)) == ("ab", 3, FinishReason.STOP, IM_END)
    (c,) = _ids("c")
    assert _run(ids, eos=[IM_END], ignore_eos=True, stop_token_ids=(c,)) == ("ab", 4, FinishReason.STOP, c)


def test_c13_the_first_of_two_end_tokens_ends_the_text() -> None:
    b, c = _ids("bc")
    assert _run(_ids("abcd"), eos=[c], stop_token_ids=(b,)) == ("a", 2, FinishReason.STOP, b)


def test_a_stop_token_keeps_its_text_where_stops_are_included() -> None:
    (b,) = _ids("b")
    assert _run(_ids("abc"), stop_token_ids=(b,), include_stop_str_in_output=True)[0] == "ab"


def test_an_end_token_releases_what_was_held_back() -> None:
    ids = [*_ids("so EN"), IM_END]
    assert _run(ids, eos=[IM_END], stop=("END",)) == ("so EN", 6, FinishReason.STOP, None)
    assert _run([*_ids("so 👍")[:-1], IM_END], eos=[IM_END])[0] == "so \ufffd"


def test_c05_a_stop_string_that_ends_inside_a_token_cuts_the_text_there() -> None:
    server = BYTE_LEVEL.encode(" serving")
    the = BYTE_LEVEL.encode("the")
    assert len(server) <= 3
    ids = [*the, *server, *the]
    text, kept, reason, stop = _run(ids, stop=("e ser",))
    assert (text, reason, stop) == ("th", FinishReason.STOP, "e ser")
    first_end = next(n for n in range(len(ids)) if "e ser" in BYTE_LEVEL.decode(ids[:n]))
    assert kept == first_end
    assert _run(ids, stop=("e ser",), include_stop_str_in_output=True)[0] == "the ser"


def test_c05_the_stop_string_that_ends_first_wins() -> None:
    assert _run(_ids("one two three"), stop=("two three", "wo")) == ("one t", 7, FinishReason.STOP, "wo")
    assert _run(_ids("one two three"), stop=("wo", "two three")) == ("one t", 7, FinishReason.STOP, "wo")
    assert _run(_ids("one two"), stop=("o", "two"))[3] == "o"


def test_text_that_may_begin_a_stop_string_is_held_back_and_then_released() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=("<stop>",)), ())
    assert detokenizer.push(_ids("a<sto")).text == "a"
    assert detokenizer.push(_ids("<")).text == "<sto"
    assert detokenizer.push(_ids("st")).text == ""
    assert detokenizer.finish() == "<st"


def _naive(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...], keeps: bool) -> tuple[str, int, str | None]:
    """After each token look for the stop string that ends first, in the whole text."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        ends = [(text.find(stop) + len(stop), order) for order, stop in enumerate(stops) if stop in text]
        if ends:
            end, order = min(ends)
            return text[: end if keeps else end - len(stops[order])], count, stops[order]
    return tokenizer.decode(ids), len(ids), None


letters = st.text(alphabet="ab ", min_size=1, max_size=5)


@settings(max_examples=300)
@given(st.text(alphabet="ab ", max_size=40), st.lists(letters, min_size=1, max_size=4), cut_points, st.booleans())
def test_stops_are_found_as_a_search_of_the_whole_text_finds_them(
    text: str, stops: list[str], cuts: list[int], keeps: bool
) -> None:
    for encode in (_ids, BYTE_LEVEL.encode):
        ids = encode(text)
        found = _run(ids, cuts, stop=tuple(stops), include_stop_str_in_output=keeps)
        expected_text, expected_kept, stop = _naive(BYTE_LEVEL, ids, tuple(stops), keeps)
        assert found == (expected_text, expected_kept, FinishReason.STOP if stop else None, stop)


def test_the_saved_tokenizer_streams_like_the_one_in_memory(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tiny_tokenizer(tmp_path)))
    encode: Callable[[str], list[int]] = tokenizer.encode
    ids = encode("the server drafts 👍")
    assert _stream(Detokenizer(tokenizer, SamplingParams(), ()), [[i] for i in ids])[0] == "the server drafts 👍"
