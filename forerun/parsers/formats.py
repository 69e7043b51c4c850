"""The tags that models put around their reasoning. No torch here, and no text processing: names and tags only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.errors import ConfigError

TAG_PAIR = "tags:"
PROMPT_TAIL = 64  # tokens of a prompt: enough to see whether it closes its reasoning


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, /) -> str: ...


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning ends with `end`; what follows is the answer. A text begins inside of it, whether the template has
    written `start` already or the model still does, unless the prompt has closed it (as templates do that are told
    not to think).

    Attributes:
        name: what `--reasoning-parser` says.
        start, end: the tags.
    """

    name: str
    start: str
    end: str

    def begins_inside(self, prompt: str) -> bool:
        """Whether a text that follows this prompt begins inside of the reasoning. Only the prompt's end counts: tags
        further up are a message's own."""
        return not prompt.rstrip().endswith(self.end)

    def begins_inside_after(self, prompt: Sequence[int], tokenizer: Decoder) -> bool:
        """The same of a prompt's token ids."""
        return self.begins_inside(tokenizer.decode(prompt[-PROMPT_TAIL:], False))


REASONING_FORMATS = {
    format.name: format
    for format in (
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>"),
    )
}


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of `--reasoning-parser`: a known name, or any pair of tags as `tags:START,END`.

    Raises:
        ConfigError: no such name, or a pair that is none.
    """
    if name in REASONING_FORMATS:
        return REASONING_FORMATS[name]
    if (pair := tag_pair(name)) is not None:
        return ReasoningFormat(name, *pair)
    known = ", ".join(REASONING_FORMATS)
    raise ConfigError(f"--reasoning-parser={name!r} is not known: use {known}, or a pair of tags, {TAG_PAIR}START,END")


def tag_pair(name: str) -> tuple[str, str] | None:
    """START and END of `tags:START,END`; None for any other text."""
    start, comma, end = name.removeprefix(TAG_PAIR).partition(",")
    valid = name.startswith(TAG_PAIR) and comma and start and end and start != end and "," not in end
    return (start, end) if valid else None
