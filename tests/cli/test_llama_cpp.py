"""llama.cpp's flags: what JSON each command line means, what is noted, what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cli import main
from forerun.cli.config import render_markdown
from forerun.cli.llama_cpp import FLAGS, NOTE_FLAG, flag_rows, translate
from forerun.errors import ConfigError
from forerun.spec.config import SpeculativeConfig
from forerun.spec.keys import KEYS, METHODS
from forerun.spec.source import FLAG

SYNTHETIC = {"rejection_sample_method": "synthetic"}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3, "model": "d.gguf"}
MOD = {"method": "ngram_mod", "num_speculative_tokens": 64, "ngram_mod_n_match": 24, "ngram_mod_n_min": 48}
SIMPLE = {"method": "ngram", "num_speculative_tokens": 48, "prompt_lookup_min": 12, "prompt_lookup_max": 12}
# What their command line says that has no counterpart.
PLACED = "-ngl 99 -ngld 99 -devd none --spec-draft-threads 4 --spec-draft-prio-batch 2 --no-spec-draft-backend-sampling"


def read(line: str) -> tuple[dict[str, Any] | None, list[str], list[str]]:
    """The JSON that `serve MODEL` with these words means, the notes, and the words that are left."""
    words = translate(["serve", "m", *shlex.split(line)])
    assert words[:2] == ["serve", "m"]
    rest, config, notes = words[2:], None, []
    while NOTE_FLAG in rest:
        place = rest.index(NOTE_FLAG)
        notes.append(rest[place + 1])
        del rest[place : place + 2]
    if FLAG in rest and notes and "llama.cpp's spelling" in notes[0]:
        place = rest.index(FLAG)
        config = json.loads(rest[place + 1])
        assert notes.pop(0).endswith(f"{FLAG} '{rest[place + 1]}'")
        del rest[place : place + 2]
    return config, notes, rest


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(line)
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.parametrize(
    ("line", "config"),
    [
        ("--spec-type draft-simple -md d.gguf", DRAFT),
        ("--spec-type draft-simple --model-draft d.gguf", DRAFT),
        ("--spec-type=draft-simple --spec-draft-model=d.gguf", DRAFT),
        ("--spec_type draft-simple --spec_draft_model d.gguf", DRAFT),
        ("--spec-type draft-simple -hfd org/model", DRAFT | {"model": "org/model"}),
        ("-md d.gguf", {"num_speculative_tokens": 3, "model": "d.gguf"}),
        ("--spec-default", MOD),
        ("--spec-type ngram-mod", MOD),
        ("--spec-type ngram-simple", SIMPLE),
        ("--spec-type ngram-map-k", {"method": "suffix"}),
        ("--spec-type ngram-cache,ngram-map-k4v", {"method": "suffix"}),
        ("--spec-type ngram-map-k --spec-ngram-map-k-size-m 16", {"method": "suffix", "num_speculative_tokens": 16}),
        ("--spec-type ngram-mod --spec-ngram-mod-n-match 12 --spec-ngram-mod-n-min 2 --spec-ngram-mod-n-max 32",
         {"method": "ngram_mod", "num_speculative_tokens": 32, "ngram_mod_n_match": 12, "ngram_mod_n_min": 2}),
        ("--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8",
         {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 4, "prompt_lookup_max": 4}),
        ("-md d --spec-type draft-simple --spec-draft-n-max 8 --spec-draft-n-min 2 --spec-draft-p-min 0.75 "
         "--spec-draft-sampling probabilistic -ctkd f32 -ctvd f32",
         {"method": "draft_model", "model": "d", "num_speculative_tokens": 8, "draft_min_tokens": 2,
          "draft_min_prob": 0.75, "draft_sample_method": "probabilistic", "kv_cache_dtype": "float32"}),
        ("-md d --draft-max 8 --draft-min 2 --draft-p-min 0.5",
         {"model": "d", "num_speculative_tokens": 8, "draft_min_tokens": 2, "draft_min_prob": 0.5}),
        # Those without a model go first, whatever the order they are given in; each type once.
        ("--spec-type draft-simple,ngram-mod -md d.gguf", {"method": [MOD, DRAFT]}),
        ("--spec-type draft-simple --spec-type ngram-mod,ngram-simple -md d.gguf", {"method": [SIMPLE, MOD, DRAFT]}),
        ("--spec-default --spec-type ngram-mod", MOD),
        ("--spec-type draft-eagle3 -md h", {"method": "eagle3", "num_speculative_tokens": 3, "model": "h"}),
        ("--spec-type draft-mtp", {"method": "mtp", "num_speculative_tokens": 3}),
        ("--spec-type draft-dspark -md h --spec-draft-conf-min 0.4",
         {"method": "dspark", "num_speculative_tokens": 3, "model": "h", "dspark_min_confidence": 0.4}),
        ("--spec-default --spec-synth-len 2.5", MOD | SYNTHETIC | {"synthetic_acceptance_length": 2.5}),
        ("--spec-default --spec-synth-rates 0.5,0.25",
         MOD | SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.25]}),
        ("--spec-type none", None),
    ],
)  # fmt: skip
def test_flags_become_json(line: str, config: dict[str, Any] | None) -> None:
    found, _, rest = read(line)
    assert found == config
    assert rest == []


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (PLACED, ["-ngl", "-ngld", "-devd", "--spec-draft-threads", "--spec-draft-prio-batch", "--no-spec-draft"]),
        ("-md d --spec-draft-p-split 0.1", ["--spec-draft-p-split 0.1 has no effect: only spec_tree"]),
        ("--spec-type ngram-simple --spec-draft-n-max 64", ["--spec-draft-n-max 64 has no effect: it is for a draft"]),
        ("--spec-type ngram-simple --spec-ngram-mod-n-max 64", ["--spec-ngram-mod-n-max 64 has no effect"]),
        ("--spec-draft-n-max 64", ["--spec-draft-n-max 64 has no effect"]),
        ("--spec-type none -md d", ["-md d has no effect"]),
        ("--spec-type ngram-map-k", ["--spec-type ngram-map-k: suffix is taken"]),
        ("--spec-type ngram-map-k --spec-ngram-map-k-size-n 8", ["suffix is taken", "size-n 8 has no effect"]),
    ],
)
def test_what_has_no_counterpart_is_taken_with_a_note(line: str, flags: list[str]) -> None:
    _, notes, rest = read(line)
    assert rest == []
    assert len(notes) == len(flags)
    for note, part in zip(notes, flags, strict=True):
        assert part in note


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--spec-type ngram-mood", ['"ngram-mood"', 'did you mean "ngram-mod"?']),
        ("--spec-type ''", ['--spec-type ""', "draft-simple"]),
        ("--spec-type none,ngram-mod", ["none excludes", "ngram-mod"]),
        ("--spec-type ngram-mod -md d", ['-md "d"', "draft-simple"]),
        ("-md a -hfd b", ['-md "a"', '-hfd "b"', "give one"]),
        ("-hfd org/model:Q4_K_M", ["org/model:Q4_K_M", "-md"]),
        ("-md", ["-md needs a value"]),
        ("-md --port 1", ["-md needs a value"]),
        ("--spec-default=1", ["--spec-default takes no value"]),
        ("--draft-max 5 --spec-draft-n-max 6", ["--draft-max and --spec-draft-n-max", "twice"]),
        ("-md d --spec-draft-n-max many", ["--spec-draft-n-max takes an integer", '"many"']),
        ("-md d --spec-draft-p-min x", ["--spec-draft-p-min takes a number"]),
        ("--spec-synth-rates 0.5,x --spec-default", ["--spec-synth-rates takes a number", '"x"']),
        ("-md d -ctkd q8_0", ['-ctkd "q8_0"', "f32, f16, bf16"]),
        ("-md d -ctkd f32 -ctvd f16", ["-ctvd", "float32", "float16"]),
        ("-lcs file --spec-type ngram-cache", ['-lcs "file" is not served']),
        ("-md d --spec-tokens 4", ["--spec-tokens", "-md", "mutually exclusive"]),
        ("--spec-default -sc '{}'", ["-sc", "--spec-default", "mutually exclusive"]),
        ("--spec-default -sc.method ngram", ["-sc.method", "mutually exclusive"]),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(line: str, parts: list[str]) -> None:
    message = refusal(line)
    for part in parts:
        assert part in message


def test_other_words_stay_in_place_and_other_commands_as_they_are() -> None:
    _, _, rest = read("--port 1 -md d --host 0.0.0.0 -- -md e")
    assert rest == ["--port", "1", "--host", "0.0.0.0", "--", "-md", "e"]
    for words in ([], ["config", "-md", "d"], ["demo", "--spec-default"], ["serve", "m", "--port", "1"]):
        assert translate(words) == words


WORDS = st.sampled_from([name for flag in FLAGS for name in flag.names]) | st.sampled_from(
    ["--", "1", "0.5", "ngram-mod", "draft-simple,ngram-mod", "none", "d.gguf", "f32", "--port", "-sc"]
)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(WORDS | st.text(max_size=4), max_size=7))
def test_any_words_are_translated_or_refused_in_one_line(words: list[str]) -> None:
    try:
        found = translate(["serve", *words])
    except ConfigError as error:
        message = str(error)
    else:
        assert translate(found) == found
        return
    assert message.isprintable()


def test_the_table_names_keys_and_methods_that_there_are() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert {key for flag in FLAGS for key in flag.keys} <= set(KEYS)
    for _, meaning in flag_rows():
        method = meaning.removeprefix("`method` `").rstrip("`")
        assert not meaning.startswith("`method`") or method in METHODS
    assert all(f"| {names} |" in render_markdown() for names, _ in flag_rows())


# Through the program


def served(line: str, monkeypatch: pytest.MonkeyPatch) -> SpeculativeConfig | None:
    seen: list[Any] = []
    monkeypatch.setattr("forerun.server.run.serve", lambda config, settings, web: seen.append(config) or 0)
    monkeypatch.setattr("forerun.cli.serve.log_to_stderr", lambda process: None)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m", *shlex.split(line)])
    assert not ended.value.code
    return seen[0].speculative_config


def test_serve_reads_them_and_one_line_of_the_log_shows_the_json(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = served("--spec-type draft-simple,ngram-mod -md d.gguf -ngld 99", monkeypatch)
    assert config == SpeculativeConfig.parse({"method": [MOD, DRAFT]})
    said = [line for line in caplog.messages if FLAG in line]
    assert len(said) == 1
    assert json.loads(said[0].partition(f"{FLAG} '")[2].rstrip("'")) == {"method": [MOD, DRAFT]}


def test_a_note_is_said_without_speculation_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert served("-ngl 99", monkeypatch) is None
    assert any("-ngl 99 has no effect" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("words", "resolved"),
    [
        ("--spec-type draft-eagle3 -md h", {"num_speculative_tokens": 3}),
        (
            "--spec-type draft-eagle3 -md h.gguf --draft-max 6 --draft-min 2 --draft-p-min 0.5 "
            "--spec-draft-sampling coupled",
            {
                "model": "h.gguf",
                "num_speculative_tokens": 6,
                "draft_min_tokens": 2,
                "draft_min_prob": 0.5,
                "draft_sample_method": "coupled",
            },
        ),
    ],
)
def test_a_head_is_served_by_them(words: str, resolved: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = served(words, monkeypatch)
    assert config == SpeculativeConfig.parse({"method": "eagle3", "model": "h"} | resolved)


def test_the_type_of_a_heads_cache_is_refused() -> None:
    config, _, _ = read("--spec-type draft-eagle3 -md h -ctkd f32")
    with pytest.raises(ConfigError, match='kv_cache_dtype="float32" does not go with method "eagle3"'):
        SpeculativeConfig.parse(config)


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_head_is_refused_as_any_other_configuration_of_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-p", "x"] if command == "generate" else []
    with pytest.raises(SystemExit) as ended:
        main([command, "m", *options, "--spec-type", "draft-mtp", "-md", "h"])
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith('forerun: error: speculative_config: method="mtp" is not served yet')
    assert "read as --speculative-config '" in err
    assert err.count("\n") == 1


def test_generate_drafts_by_them(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tiny_model), "-p", "the draft the draft the", "--temperature", "0", "--max-tokens", "24"]
    words += ["--kv-cache-memory", "8MiB", *shlex.split("--spec-type ngram-simple --spec-ngram-simple-size-n 2")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    err = capsys.readouterr().err
    assert '"prompt_lookup_min": 2' in err
    assert "drafted tokens accepted" in err
