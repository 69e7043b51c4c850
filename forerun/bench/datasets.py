"""Prompts to measure with: Spec-Bench, ShareGPT, JSON lines of one's own, random tokens. No torch here.

Readers give *samples*; `select` brings them to the number that is asked for. Lengths are in tokens of the tokenizer
that is handed in, which only the readers that need one ask for.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from forerun.errors import ConfigError

# Spec-Bench files MT-Bench's eight kinds of question one by one; they are one category of the benchmark
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ALL = -1
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048  # of a ShareGPT conversation that is taken
RANDOM_WARNING = (
    "random tokens cannot be guessed: what speculation brings on text does not show on them, only what it costs"
)


class Tokenizer(Protocol):
    """What readers use of `forerun.models.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def is_special(self, token_id: int) -> bool: ...
    @property
    def has_chat_template(self) -> bool: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Question:
    """The first turn of a line of Spec-Bench's question.jsonl. `category` is as the file has it."""

    category: str
    text: str

    @property
    def task(self) -> str:
        """Its category in the benchmark's own tables."""
        return "mt_bench" if self.category in MT_BENCH else self.category


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to make.

    Attributes:
        prompt: a text, or token ids.
        output_len: most tokens to generate; None: as the server has it.
        category: for figures by category; "" where the dataset has none.
    """

    prompt: str | list[int]
    output_len: int | None = None
    category: str = ""


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a file of JSON lines; empty lines are skipped.

    Raises:
        ConfigError: a line that is no JSON object, a file that is not text.
    """
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ConfigError(f"{path}, line {number}: a JSON object is needed, got {line:.60}")
            yield number, entry
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {number}: no JSON: {error}") from None


def spec_bench_questions(path: Path) -> list[Question]:
    """All questions of Spec-Bench's question.jsonl, in its order.

    Raises:
        ConfigError: a line without `turns`.
    """
    questions = []
    for number, entry in read_lines(path):
        turns = entry.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ConfigError(f"{path}, line {number}: spec_bench needs `turns`, a list of texts")
        questions.append(Question(str(entry.get("category", "")), turns[0]))
    return questions


def read_questions(path: Path, categories: Iterable[str], count: int) -> list[Question]:
    """The first `count` questions of each of these categories, category by category; `mt_bench` stands for its eight.

    Raises:
        ConfigError: a category that the file does not have.
    """
    questions = spec_bench_questions(path)
    chosen = []
    for category in categories:
        chosen += of_category(questions, category, path)[:count]
    return chosen


def of_category(questions: Sequence[Question], category: str, path: Path) -> list[Question]:
    found = [question for question in questions if category in (question.category, question.task)]
    if not found:
        known = ", ".join(dict.fromkeys(question.category for question in questions))
        raise ConfigError(f"{path} has no category {category!r}: it has {known}")
    return found


def in_turns(questions: Iterable[Question], count: int) -> list[Question]:
    """So many questions, one from each of the benchmark's categories in turn."""
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    turns = itertools.zip_longest(*by_task.values())
    return [question for turn in turns for question in turn if question is not None][:count]


def spec_bench(path: Path, *, category: str | None, output_len: int | None) -> list[Sample]:
    questions = spec_bench_questions(path)
    if category is not None:
        questions = of_category(questions, category, path)
    return [Sample(question.text, output_len, question.task) for question in questions]


def custom(path: Path, *, output_len: int | None) -> list[Sample]:
    """Lines with `prompt`, and `output_tokens` and `category` where they have them.

    Args:
        output_len: for every line; None: each line's own `output_tokens`.
    """
    samples = []
    for number, entry in read_lines(path):
        prompt = entry.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{path}, line {number}: custom needs `prompt`, a text that is not empty")
        length = output_len
        if length is None:
            length = entry.get("output_tokens")
            if type(length) is not int or length < 1:
                raise ConfigError(
                    f"{path}, line {number}: `output_tokens` must be a whole number of at least 1, got {length!r}; "
                    "give --custom-output-len otherwise"
                )
        samples.append(Sample(prompt, length, str(entry.get("category", ""))))
    return samples


def sharegpt(path: Path, tokenizer: Tokenizer, *, output_len: int | None) -> list[Sample]:
    """The first turn of each conversation, with the second one's length; too short and too long ones are left out.

    Args:
        output_len: for every conversation; None: the length of its second turn.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    samples = []
    for entry in entries if isinstance(entries, list) else ():
        turns: list[dict[str, str]] = entry.get("conversations", []) if isinstance(entry, dict) else []
        if len(turns) < 2:
            continue
        prompt, answer = (str(turn.get("value", "")) for turn in turns[:2])
        num_prompt = len(tokenizer.encode(prompt))
        length = output_len or len(tokenizer.encode(answer))
        if (
            min(num_prompt, length) >= MIN_TOKENS
            and num_prompt <= MAX_PROMPT_TOKENS
            and num_prompt + length <= MAX_TOKENS
        ):
            samples.append(Sample(prompt, length))
    if not samples:
        raise ConfigError(f"{path} has no conversation of two turns that fits: is it a ShareGPT file?")
    return samples


def random_tokens(
    tokenizer: Tokenizer,
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    seed: int,
    as_text: bool,
) -> list[Sample]:
    """Prompts of tokens drawn uniformly, special ones left out, after a prefix that all of them share.

    Args:
        range_ratio: lengths are drawn uniformly from `length * (1 - ratio)` to `length * (1 + ratio)`.
        as_text: decode them, for servers that take no token ids; the text's tokens may be a few more or less then.
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {range_ratio}")
    rng = random.Random(seed)

    def draw(length: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < length:
            token = rng.randrange(tokenizer.vocab_size)
            if not tokenizer.is_special(token):
                ids.append(token)
        return ids

    def vary(length: int) -> int:
        return rng.randint(max(1, round(length * (1 - range_ratio))), max(1, round(length * (1 + range_ratio))))

    prefix = draw(prefix_len)
    samples = []
    for _ in range(count):
        ids = prefix + draw(vary(input_len))
        samples.append(Sample(tokenizer.decode(ids) if as_text else ids, vary(output_len)))
    return samples


def select(
    samples: Sequence[Sample], count: int, *, seed: int, shuffle: bool = True, oversample: bool = True
) -> list[Sample]:
    """`count` samples (`ALL`: each once), shuffled by the seed, from the beginning again where there are too few.

    Raises:
        ConfigError: there are no samples, or too few of them and `oversample` is False.
    """
    if not samples:
        raise ConfigError("the dataset has no prompts")
    if count != ALL and count < 1:
        raise ConfigError(f"--num-prompts must be at least 1, or -1 for all, got {count}")
    chosen = list(samples)
    if shuffle:
        random.Random(seed).shuffle(chosen)
    if count == ALL:
        return chosen
    if count > len(chosen) and not oversample:
        raise ConfigError(f"--num-prompts {count}: the dataset has {len(chosen)} prompts, and --no-oversample is given")
    return list(itertools.islice(itertools.cycle(chosen), count))


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which prompts; fields are named after their flags.

    Attributes:
        output_len: replaces every dataset's own.
        chat: the server applies its chat template. Otherwise it is applied here to the datasets in `_TEMPLATED`,
            unless `skip_chat_template`.
        chat_template_kwargs: for it.
    """

    name: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    seed: int = 0
    shuffle: bool = True
    oversample: bool = True
    skip_chat_template: bool = False
    input_len: int | None = None
    output_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    spec_bench_category: str | None = None
    spec_bench_output_len: int = 256
    chat: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"--dataset-name {self.name!r} is not served: use {', '.join(NAMES)}")
        if self.name != "random" and self.path is None:
            raise ConfigError(f"--dataset-name {self.name} needs --dataset-path FILE")
        if self.name == "random" and self.path is not None:
            raise ConfigError("--dataset-path has no effect on --dataset-name random: leave it out")
        if self.name != "random" and self.input_len is not None:
            raise ConfigError(f"--input-len has no effect on --dataset-name {self.name}: leave it out")
        if self.name == "random" and self.num_prompts == ALL:
            raise ConfigError("--num-prompts -1 asks for all prompts of a file: give a number with random")
        for flag in ("input_len", "output_len", "random_input_len", "random_output_len", "spec_bench_output_len"):
            if (value := getattr(self, flag)) is not None and value < 1:
                raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1, got {value}")


Loader = Callable[[], Tokenizer]


def load_samples(options: DatasetOptions, tokenizer: Loader) -> list[Sample]:
    """The samples of a benchmark, in the order in which they are sent.

    Args:
        tokenizer: makes the one that counts; called by the datasets that need it only.
    Raises:
        ConfigError: a file that is not what its name says, an option out of range.
    """
    if options.name == "random":
        samples = random_tokens(
            tokenizer(),
            options.num_prompts,
            input_len=options.input_len or options.random_input_len,
            output_len=options.output_len or options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            seed=options.seed,
            as_text=options.chat,
        )
        return select(samples, options.num_prompts, seed=options.seed, shuffle=False)
    assert options.path is not None
    samples = _READERS[options.name](options.path, options, tokenizer)
    chosen = select(
        samples, options.num_prompts, seed=options.seed, shuffle=options.shuffle, oversample=options.oversample
    )
    if options.output_len is not None:
        chosen = [replace(sample, output_len=options.output_len) for sample in chosen]
    if options.name in _TEMPLATED and not options.chat and not options.skip_chat_template:
        chosen = templated(chosen, tokenizer(), options.chat_template_kwargs or {})
    return chosen


def templated(samples: Iterable[Sample], tokenizer: Tokenizer, kwargs: dict[str, Any]) -> list[Sample]:
    """The samples as token ids, each text as a user's message in the tokenizer's chat template.

    Raises:
        ConfigError: there is no template.
    """
    if not tokenizer.has_chat_template:
        raise ConfigError("the tokenizer has no chat template: give --skip-chat-template to send prompts as they are")
    return [
        replace(s, prompt=tokenizer.apply_chat_template([{"role": "user", "content": s.prompt}], **kwargs))
        for s in samples
    ]


_READERS: dict[str, Callable[[Path, DatasetOptions, Loader], list[Sample]]] = {
    "sharegpt": lambda path, options, tokenizer: sharegpt(
        path, tokenizer(), output_len=options.output_len or options.sharegpt_output_len
    ),
    "custom": lambda path, options, _: custom(
        path,
        output_len=options.output_len or (None if options.custom_output_len == ALL else options.custom_output_len),
    ),
    "spec_bench": lambda path, options, _: spec_bench(
        path, category=options.spec_bench_category, output_len=options.spec_bench_output_len
    ),
}
NAMES = ("random", *_READERS)
_TEMPLATED = ("custom", "spec_bench")
