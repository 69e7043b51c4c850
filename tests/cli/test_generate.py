"""`forerun generate` gives the text on stdout and what is said about it on stderr."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.llm import LLM
from forerun.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
DRAFTING = ["--spec-method", "ngram", "--spec-tokens", "4"]


def _run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str, int]:
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments, "--kv-cache-memory", "8MiB"])
    out, err = capsys.readouterr()
    return out, err, int(ended.value.code or 0)


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), kv_cache_memory_bytes=8 << 20)


def test_the_streamed_text_is_the_whole_text(llm: LLM, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (expected,) = llm.generate("the draft the draft the", GREEDY)
    common = [str(tiny_model), "-p", "the draft the draft the", "--max-tokens", "24", "--temperature", "0"]
    for options in ([], DRAFTING):
        out, err, code = _run(common + options, capsys)
        assert (out, code) == (expected.outputs[0].text + "\n", 0)
        assert err.count("\n") == 1
        assert f"{len(expected.outputs[0].token_ids)} tokens, {expected.outputs[0].finish_reason}" in err
        assert ("drafted tokens accepted" in err) is bool(options)


def test_json_holds_the_tokens_the_seed_and_the_figures(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], llm: LLM
) -> None:
    arguments = [str(tiny_model), "-p", "the server", "--json", "--max-tokens", "12", "--logprobs", "2", "--seed", "7"]
    out, _, code = _run([*arguments, *DRAFTING], capsys)
    answer = json.loads(out)
    assert code == 0
    (expected,) = llm.generate("the server", SamplingParams(max_tokens=12, seed=7))
    assert answer["token_ids"] == expected.outputs[0].token_ids
    assert answer["text"] == expected.outputs[0].text
    assert answer["seed"] == 7
    assert len(answer["drafted"]) == len(answer["logprobs"]) == len(answer["token_ids"])
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4


def test_a_drawn_seed_is_shown_and_gives_the_text_again(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(tiny_model), "-p", "the", "--max-tokens", "12"]
    out, err, _ = _run(common, capsys)
    seed = err.rpartition("seed ")[2].strip()
    assert _run([*common, "--seed", seed], capsys)[0] == out


def test_chat_wraps_the_prompt_and_stdin_can_bring_it(
    llm: LLM, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the draft"}]
    (expected,) = llm.chat(messages, GREEDY)
    monkeypatch.setattr("sys.stdin", io.StringIO("the draft"))
    options = ["--chat", "--system", "be brief", "--max-tokens", "24", "--temperature", "0"]
    out, _, _ = _run([str(tiny_model), "-p", "-", *options], capsys)
    assert out == expected.outputs[0].text + "\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no/such/model", "-p", "x"], "no such file or directory"),
        (["MODEL", "-p", ""], "the prompt is empty"),
        (["MODEL", "-p", "x" * 300], "max_model_len is 256"),
        (["MODEL", "-p", "x", "--temperature", "-1"], "temperature must be in"),
        (["MODEL", "-p", "x", "--logprobs", "2"], "--json"),
        (["MODEL", "-p", "x", "--system", "s"], "--chat"),
        (["MODEL", "-p", "x", "--spec-method", "ngrm"], "ngram"),
    ],
)
def test_a_users_mistake_is_one_line(
    arguments: list[str], says: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err, code = _run([str(tiny_model) if word == "MODEL" else word for word in arguments], capsys)
    assert (out, code) == ("", 1)
    assert says in err
    assert err.count("\n") == 1


def test_the_form_of_the_text_may_be_given(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(tiny_model), "-p", "the server", "--temperature", "0", "--reasoning-parser", "tags:<r>,er"]
    out, _, code = _run([*common[:-2], "--structured-outputs", '{"choice": ["yes", "no"]}'], capsys)
    assert (out in ("yes\n", "no\n"), code) == (True, 0)
    out, _, code = _run([*common, "--structured-outputs", '{"choice": ["yes", "no"]}'], capsys)
    assert (out in ("yes\n", "no\n"), code) == (True, 0), "the prompt has closed the reasoning"
    for wrong in ("{", '{"choice": []}'):
        _, err, code = _run([*common, "--structured-outputs", wrong], capsys)
        assert code != 0
        assert "structured" in err
        assert err.count("\n") == 1
