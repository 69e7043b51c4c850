"""Datasets: what is taken from each file, how many, and what is said of a file that is not what it should be."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.datasets import (
    ALL,
    DatasetOptions,
    Question,
    Sample,
    in_turns,
    load_samples,
    read_questions,
    select,
    spec_bench_questions,
)
from forerun.errors import ConfigError
from tests.server.fake_engine import ByteTokenizer

LINES = [
    {"question_id": 1, "category": "writing", "turns": ["write", "again"]},
    {"question_id": 2, "category": "coding", "turns": ["code"]},
    {"question_id": 3, "category": "qa", "turns": ["ask"]},
    {"question_id": 4, "category": "qa", "turns": ["ask more"]},
]


class Tokenizer(ByteTokenizer):
    """A token a byte; the first 128 alone are not special."""

    def is_special(self, token_id: int) -> bool:
        return token_id >= 128


def tokenizer() -> Any:
    return Tokenizer()


def no_tokenizer() -> Any:
    raise AssertionError("this dataset needs no tokenizer")


@pytest.fixture
def spec_bench(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return path


def loaded(tokenizer: Callable[[], Any] = no_tokenizer, **options: Any) -> list[Sample]:
    return load_samples(DatasetOptions(**{"num_prompts": ALL, "shuffle": False, "chat": True, **options}), tokenizer)


def test_spec_bench_gives_first_turns_by_its_six_categories(spec_bench: Path) -> None:
    assert loaded(name="spec_bench", path=spec_bench) == [
        Sample("write", 256, "mt_bench"),
        Sample("code", 256, "mt_bench"),
        Sample("ask", 256, "qa"),
        Sample("ask more", 256, "qa"),
    ]


@pytest.mark.parametrize(
    ("category", "texts"), [("qa", ["ask", "ask more"]), ("coding", ["code"]), ("mt_bench", ["write", "code"])]
)
def test_a_category_is_the_files_or_the_benchmarks(spec_bench: Path, category: str, texts: Sequence[str]) -> None:
    samples = loaded(name="spec_bench", path=spec_bench, spec_bench_category=category, spec_bench_output_len=5)
    assert [(sample.prompt, sample.output_len) for sample in samples] == [(text, 5) for text in texts]
    assert [question.text for question in read_questions(spec_bench, [category], 2)] == list(texts)


def test_an_unknown_category_is_named_with_those_that_there_are(spec_bench: Path) -> None:
    with pytest.raises(ConfigError, match="no category 'poetry': it has writing, coding, qa"):
        loaded(name="spec_bench", path=spec_bench, spec_bench_category="poetry")


def test_questions_in_turns_take_the_same_number_of_each_category(spec_bench: Path) -> None:
    assert [q.text for q in in_turns(spec_bench_questions(spec_bench), 3)] == ["write", "ask", "code"]
    assert Question("humanities", "").task == "mt_bench"


def test_an_output_length_replaces_the_datasets_own(spec_bench: Path) -> None:
    assert {sample.output_len for sample in loaded(name="spec_bench", path=spec_bench, output_len=9)} == {9}


def test_completions_get_the_chat_template_here(spec_bench: Path) -> None:
    samples = loaded(tokenizer, name="spec_bench", path=spec_bench, chat=False)
    assert samples[0].prompt == list(b"write|user\nassistant:")
    assert loaded(name="spec_bench", path=spec_bench, chat=False, skip_chat_template=True)[0].prompt == "write"


def test_a_model_without_a_template_says_what_to_do(spec_bench: Path) -> None:
    with pytest.raises(ConfigError, match="--skip-chat-template"):
        loaded(lambda: Tokenizer(has_chat_template=False), name="spec_bench", path=spec_bench, chat=False)


def test_custom_lines_may_bring_their_length(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n{"prompt": "b", "output_tokens": 4, "category": "x"}\n')
    assert loaded(name="custom", path=path) == [Sample("a", 256), Sample("b", 256, "x")]
    assert loaded(name="custom", path=path, custom_output_len=ALL) == [Sample("a", 3), Sample("b", 4, "x")]


def test_sharegpt_takes_the_first_turn_and_the_length_of_the_second(tmp_path: Path) -> None:
    def talk(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": turn} for turn in turns]}

    path = tmp_path / "share.json"
    talks = [talk("a question", "an answer"), talk("hi", "too short a prompt"), talk("alone"), talk("x" * 1025, "long")]
    path.write_text(json.dumps(talks))
    assert loaded(tokenizer, name="sharegpt", path=path) == [Sample("a question", 9)]
    assert loaded(tokenizer, name="sharegpt", path=path, sharegpt_output_len=50) == [Sample("a question", 50)]


def test_random_prompts_have_their_lengths_and_no_special_tokens() -> None:
    samples = loaded(
        tokenizer, name="random", num_prompts=50, chat=False, random_input_len=20, random_prefix_len=4,
        random_output_len=10, random_range_ratio=0.5,
    )  # fmt: skip
    lengths = {len(sample.prompt) - 4 for sample in samples}
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 5
    assert {tuple(sample.prompt[:4]) for sample in samples} == {tuple(samples[0].prompt[:4])}
    assert all(token < 128 for sample in samples for token in sample.prompt if isinstance(token, int))
    assert all(5 <= (sample.output_len or 0) <= 15 for sample in samples)


def test_random_prompts_are_texts_for_a_chat() -> None:
    (sample,) = loaded(tokenizer, name="random", num_prompts=1, input_len=5, output_len=2)
    assert isinstance(sample.prompt, str)
    assert (len(sample.prompt), sample.output_len) == (5, 2)


def test_the_number_of_prompts_is_what_was_asked_for() -> None:
    samples = [Sample(str(number)) for number in range(5)]
    assert select(samples, ALL, seed=0, shuffle=False) == samples
    assert select(samples, 7, seed=0, shuffle=False) == samples + samples[:2]
    shuffled = select(samples, ALL, seed=3)
    assert shuffled != samples
    assert set(shuffled) == set(samples)
    assert select(samples, 3, seed=3) == shuffled[:3]
    with pytest.raises(ConfigError, match="has 5 prompts, and --no-oversample"):
        select(samples, 6, seed=0, oversample=False)
    with pytest.raises(ConfigError, match="--num-prompts must be at least 1, or -1 for all, got 0"):
        select(samples, 0, seed=0)
    with pytest.raises(ConfigError, match="no prompts"):
        select([], 1, seed=0)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("spec_bench", '{"turns": []}', "line 1: spec_bench needs `turns`"),
        ("spec_bench", "\n[1]", "line 2: a JSON object is needed"),
        ("spec_bench", '{"turns": ["a"]}\n{', "line 2: no JSON"),
        ("spec_bench", "", "no prompts"),
        ("custom", '{"text": "a"}', "line 1: custom needs `prompt`"),
        ("sharegpt", "{", "no JSON"),
        ("sharegpt", "[]", "is it a ShareGPT file"),
    ],
)
def test_a_file_of_another_kind_is_one_line_that_names_the_place(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        loaded(tokenizer, name=name, path=path)


def test_a_line_without_a_length_is_told_how_to_get_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text('{"prompt": "a"}')
    with pytest.raises(ConfigError, match=r"line 1: `output_tokens` must be .* got None; give --custom-output-len"):
        loaded(name="custom", path=path, custom_output_len=ALL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "hf"}, "--dataset-name 'hf' is not served: use random, sharegpt, custom, spec_bench"),
        ({"name": "custom"}, "--dataset-name custom needs --dataset-path"),
        ({"name": "random", "path": Path("x")}, "no effect"),
        ({"name": "random", "num_prompts": ALL}, "give a number with random"),
        ({"name": "custom", "path": Path("x"), "input_len": 3}, "--input-len has no effect"),
        ({"output_len": 0}, "--output-len must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_meant_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DatasetOptions(**options)
