"""From what a request says to token ids: the prompt forms of completions, and what is judged of any prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forerun.errors import RequestError
from forerun.server.fields import shorten

T = TypeVar("T")

INLINE_BYTES = 4_000  # a few milliseconds of work; what has more goes to a thread, so that streams go on meanwhile


@dataclass(frozen=True)
class Limits:
    """What is judged before anything is tokenised, by looking at sizes only.

    Attributes:
        max_model_len: tokens of a prompt and its answer.
        max_prompts, max_messages, max_text_bytes: as in `ServerSettings`.
    """

    max_model_len: int
    max_prompts: int
    max_messages: int
    max_text_bytes: int

    def check_sizes(self, tokenizer: Tokenizer, parts: Sequence[str | list[Any]], field: str) -> int:
        """Bytes of all texts, a token id counting as one.

        Raises:
            RequestError: a part cannot be as short as `max_model_len` tokens, or all of them together are too much.
        """
        total = 0
        for part in parts:
            size = _num_bytes(part) if isinstance(part, str) else len(part)
            if isinstance(part, str) and size > self.max_model_len * tokenizer.max_token_bytes:
                raise RequestError(
                    f"{field} has {size} bytes of text, too many for max_model_len, which is {self.max_model_len} "
                    f"tokens of at most {tokenizer.max_token_bytes} bytes each",
                    field,
                )
            if not isinstance(part, str):
                check_length(part, field, self.max_model_len)
            total += size
        if total > self.max_text_bytes:
            raise RequestError(
                f"{field} has {total} bytes of text or token ids, at most {self.max_text_bytes} are accepted",
                field,
            )
        return total


class Tokenizer(Protocol):
    """What the server needs of `forerun.models.tokenizer.Tokenizer`."""

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def template_words(self) -> frozenset[str]:
        """All words of the chat template: what it does not name, it cannot take."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text that one token stands for."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...


async def completion_prompts(
    tokenizer: Tokenizer, prompt: Any, add_special_tokens: bool, limits: Limits
) -> list[list[int]]:
    """Token ids of each prompt of a completion request: text, ids, or a list of either.

    Raises:
        RequestError: another form, an empty list, or more than the limits allow.
    """
    parts = _parts(prompt, limits.max_prompts)
    size = limits.check_sizes(tokenizer, parts, "prompt")

    def encode(part: str | list[Any]) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=add_special_tokens) if isinstance(part, str) else part

    for part in parts:
        if not isinstance(part, str) and not set(map(type, part)) <= {int}:
            wrong = next(item for item in part if type(item) is not int)
            raise RequestError(f"prompt must hold token ids (integers), got {shorten(wrong)}", "prompt")
    return await offload(size, lambda: [encode(part) for part in parts])


def prompt_texts(tokenizer: Tokenizer, prompt: Any, token_ids: Sequence[list[int]]) -> list[str]:
    """The text of each prompt: as it was given, or that of its tokens."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(parts[0], str):
        return list(parts)
    return [tokenizer.decode(ids) for ids in token_ids]


def _parts(prompt: Any, max_prompts: int) -> list[str | list[Any]]:
    """The prompts that a request brings; what stands in lists of token ids is not looked at."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt or type(prompt[0]) not in (int, str, list):
        raise RequestError(f"prompt must be text, token ids, or a list of either, got {shorten(prompt)}", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > max_prompts:
        raise RequestError(f"prompt holds {len(prompt)} prompts, at most {max_prompts} are accepted", "prompt")
    if len(set(map(type, prompt))) > 1:
        raise RequestError("prompt must hold only text, only token ids or only lists of token ids", "prompt")
    return prompt


def check_prompt(token_ids: Sequence[int], field: str, vocab_size: int, max_model_len: int) -> None:
    """
    Raises:
        RequestError: no token, an id out of the vocabulary, or no room for a single token of output.
    """
    if not token_ids:
        raise RequestError(f"{field} is empty: it gives no tokens, and there is nothing to go on from", field)
    check_length(token_ids, field, max_model_len)
    check_token_ids(token_ids, field, vocab_size)


def check_length(token_ids: Sequence[int], field: str, max_model_len: int) -> None:
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"{field} has {len(token_ids)} tokens, which leaves no room for output: max_model_len is {max_model_len}",
            field,
        )


def check_token_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise RequestError(f"{field}: token id {shorten(wrong)} is not in the vocabulary [0, {vocab_size})", field)


async def offload(num_bytes: int, work: Callable[[], T]) -> T:
    """Do `work` here or, where there is much of it, in a thread: it must let others have Python's lock."""
    return work() if num_bytes <= INLINE_BYTES else await asyncio.to_thread(work)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
