"""The tokenizer gives exact bytes, knows its end tokens, and refuses in one line."""

from __future__ import annotations

import json
import logging
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from forerun.errors import CheckpointError, ConfigError, RequestError
from forerun.models.tokenizer import Spelling, Tokenizer, load_tokenizer
from tests.tiny_tokenizer import (
    ENDOFTEXT,
    IM_END,
    IM_START,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    save_tiny_tokenizer,
    tiny_backend,
)

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(str(save_tiny_tokenizer(tmp_path)))


def test_every_byte_has_its_token_and_every_token_its_bytes(tiny: Tokenizer) -> None:
    assert tiny.spelling is Spelling.BYTE_LEVEL
    assert tiny.vocab_size == VOCAB_SIZE
    singles = {tiny.token_bytes(i) for i in range(3, 259)}
    assert singles == {bytes([byte]) for byte in range(256)}
    assert [tiny.token_bytes(i).decode() for i in range(3)] == list(SPECIAL_TOKENS)
    text = "the server\ndrafts 👍 é\x00"
    assert b"".join(tiny.token_bytes(i) for i in tiny.encode(text)) == text.encode()
    assert tiny.token_bytes(VOCAB_SIZE) == tiny.token_bytes(-1) == b""
    assert [i for i in range(VOCAB_SIZE) if tiny.is_special(i)] == [ENDOFTEXT, IM_START, IM_END]
    assert (tiny.bos_token_id, tiny.eos_token_ids) == (IM_START, {IM_END})


def test_special_tokens_are_left_out_of_the_text_or_kept(tiny: Tokenizer) -> None:
    ids = tiny.encode("<|im_start|>the<|im_end|>")
    assert ids[0] == IM_START
    assert ids[-1] == IM_END
    assert tiny.decode(ids) == "the"
    assert tiny.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"


def test_the_chat_template_is_applied(tiny: Tokenizer) -> None:
    ids = tiny.apply_chat_template(USER)
    assert tiny.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    unfinished = [*USER, {"role": "assistant", "content": "Hel"}]
    continued = tiny.apply_chat_template(unfinished, add_generation_prompt=False, continue_final_message=True)
    assert tiny.decode(continued, skip_special_tokens=False).endswith("<|im_start|>assistant\nHel")


@pytest.mark.parametrize(
    ("messages", "says"),
    [([{"role": "judge", "content": ""}], "unknown role judge"), ([{"role": "user"}], "content"), (["x"], "template")],
)
def test_messages_that_the_template_refuses_are_a_request_error(
    tiny: Tokenizer, messages: list[dict[str, str]], says: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        tiny.apply_chat_template(messages)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_a_request_cannot_bring_its_own_template(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="chat_template") as caught:
        tiny.apply_chat_template(USER, chat_template="{{ 1 }}")
    assert caught.value.param == "chat_template_kwargs"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tiny_tokenizer(tmp_path, chat_template=None)))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template(USER)
    assert caught.value.param == "messages"


def test_text_that_is_no_unicode_is_a_request_error(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        tiny.encode("\ud800")


@pytest.mark.parametrize(("eos", "expected"), [(0, {0, IM_END}), ([0, 7], {0, 7, IM_END}), (None, {5, IM_END})])
def test_the_generation_config_adds_end_tokens_and_config_json_stands_in(
    tmp_path: Path, eos: object, expected: set[int]
) -> None:
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_tokenizer(str(tmp_path)).eos_token_ids == expected


def test_a_truncating_tokenizer_file_does_not_truncate(tmp_path: Path) -> None:
    backend = tiny_backend()
    backend.enable_truncation(4)
    tokenizer = load_tokenizer(str(save_tiny_tokenizer(tmp_path, backend=backend)))
    assert tokenizer.decode(tokenizer.encode("a long text " * 9)) == "a long text " * 9


def test_another_tokenizer_may_be_named(tmp_path: Path) -> None:
    assert load_tokenizer("no/such/model", str(save_tiny_tokenizer(tmp_path))).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("broken", ["{", "[]", "{}"])
def test_what_cannot_be_loaded_is_a_config_error_of_one_line(tmp_path: Path, broken: str) -> None:
    with pytest.raises(ConfigError, match="no tokenizer in"):
        load_tokenizer(str(tmp_path))
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_loading_leaves_log_levels_as_they_were(tmp_path: Path) -> None:
    before = logging.getLogger("transformers").level
    load_tokenizer(str(save_tiny_tokenizer(tmp_path)))
    assert logging.getLogger("transformers").level == before


# ---- GGUF ---------------------------------------------------------------------------------------------------------


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf(path: Path, **changes: object) -> Path:
    """The tiny tokenizer as a .gguf file without tensors."""
    model = json.loads(tiny_backend().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    values: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i < 3 else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": IM_START,
        "tokenizer.ggml.eos_token_id": IM_END,
        "tokenizer.ggml.eot_token_id": ENDOFTEXT,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    body = b"".join(_string(key) + _value(value) for key, value in values.items() if value is not None)
    count = sum(value is not None for value in values.values())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, count) + body)
    return path


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    assert isinstance(value, list)
    if isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    if isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(item) for item in value)


def test_a_gguf_file_gives_the_tokenizer_that_it_was_made_from(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(_gguf(tmp_path / "tiny.gguf")))
    expected: Backend = tiny_backend()
    for text in ("the server drafts 123 tokens\n  x", "<|im_start|>é👍<|im_end|>", " don't  "):
        assert tokenizer.encode(text) == expected.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (IM_START, {IM_END, ENDOFTEXT})
    assert tokenizer.decode(tokenizer.apply_chat_template(USER)) == "Hi"
    assert [i for i in range(VOCAB_SIZE) if tokenizer.is_special(i)] == [ENDOFTEXT, IM_START, IM_END]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_a_gguf_file_is_read_as_transformers_reads_it(tmp_path: Path, pre: str) -> None:
    from transformers import PreTrainedTokenizerFast

    _gguf(tmp_path / "tiny.gguf", pre=pre)
    tokenizer = load_tokenizer(str(tmp_path / "tiny.gguf"))
    other = PreTrainedTokenizerFast.from_pretrained(str(tmp_path), gguf_file="tiny.gguf")
    for text in ("the server's draft, 1234 tokens\n\n  and  more", "<|im_start|>user\nthe<|im_end|>"):
        assert tokenizer.encode(text) == other.encode(text)


def test_smollm_text_is_split_at_every_digit(tmp_path: Path) -> None:
    """transformers splits it as GPT-2's: "  1" gives other ids than those that the model was trained on."""
    merges = ["Ġ Ġ", "1 2", "Ġ 1"]
    tokens = [*SPECIAL_TOKENS, "Ġ", "1", "2", "x", "ĠĠ", "12", "Ġ1"]
    types = [3, 3, 3, *[1] * 7]
    tokenizer = load_tokenizer(
        str(_gguf(tmp_path / "s.gguf", pre="smollm", tokens=tokens, merges=merges, token_type=types))
    )
    assert [tokenizer.token_text(i) for i in tokenizer.encode("x  12")] == ["x", "  ", "1", "2"]


def test_a_way_to_split_that_we_do_not_know_is_left_to_transformers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(_gguf(tmp_path / "tiny.gguf", pre="tekken")))
    assert tokenizer.decode(tokenizer.encode("the draft 12")) == "the draft 12"
    assert tokenizer.eos_token_ids == {IM_END, ENDOFTEXT}


def test_a_gguf_files_neighbours_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert load_tokenizer(str(_gguf(tmp_path / "tiny.gguf", pre="tekken"))).vocab_size == VOCAB_SIZE


def test_a_gguf_file_that_wants_the_first_token_gets_it(tmp_path: Path) -> None:
    for pre, add, has_bos in (("gpt-2", True, True), ("gpt-2", None, False), ("llama-bpe", None, True)):
        tokenizer = load_tokenizer(str(_gguf(tmp_path / "tiny.gguf", pre=pre, add_bos_token=add)))
        assert (tokenizer.encode("the")[0] == IM_START) is has_bos
        assert tokenizer.encode("the", add_special_tokens=False)[0] != IM_START


def test_broken_gguf_files_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = _gguf(tmp_path / "tiny.gguf").read_bytes()
    broken = [
        b"",
        b"PK\x03\x04" + bytes(40),
        whole[:4] + b"\x09" + whole[5:],
        *(whole[:n] for n in (4, 20, 60, 400, 3000)),
    ]
    for content in broken:
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"broken\.gguf") as caught:
            load_tokenizer(str(tmp_path / "broken.gguf"))
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(str(_gguf(tmp_path / "bare.gguf", tokens=None)))


def test_a_gguf_tokenizer_does_not_import_torch(tmp_path: Path) -> None:
    _gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys; from forerun.models.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(tmp_path / 'tiny.gguf')!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_sentencepiece_gguf_file_goes_through_transformers(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["\u2581", "h", "i", "t", "hi", "\u2581hi", "\u2581t"]
    path = _gguf(
        tmp_path / "spm.gguf",
        model="llama",
        pre="default",
        tokens=tokens + words,
        token_type=types + [1] * len(words),
        scores=[0.0] * len(tokens) + [-float(i) for i in range(len(words))],
        merges=None,
        bos_token_id=1,
        eos_token_id=2,
        eot_token_id=None,
        add_bos_token=True,
    )
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.spelling is Spelling.SENTENCEPIECE
    assert tokenizer.eos_token_ids == {2}
    ids = tokenizer.encode("hi hi👍")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "hi hi👍"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.token_bytes(tokens.index("<0xFF>") + 6) == b" hi"
