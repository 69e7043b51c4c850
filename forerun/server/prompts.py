"""From what a request says to token ids: the prompt forms of completions, and the messages of a chat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from forerun.errors import RequestError
from forerun.server.fields import MESSAGE_NOT_SERVED, served_fields, shorten

T = TypeVar("T")

INLINE_CHARS = 20_000  # longer text is tokenised in a thread, so that streams go on meanwhile
RESERVED_KWARGS = frozenset(
    {"self", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template"}
)
MAX_PROMPTS = 1024  # in one request


class Tokenizer(Protocol):
    """What the server needs of `forerun.models.tokenizer.Tokenizer`."""

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


async def completion_prompts(tokenizer: Tokenizer, prompt: Any, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each prompt of a completion request: text, ids, or a list of either.

    Raises:
        RequestError: another form, or an empty list.
    """
    parts: list[str | list[Any]]
    if isinstance(prompt, str):
        parts = [prompt]
    elif not isinstance(prompt, list) or not prompt:
        raise RequestError(f"prompt must be text, token ids, or a list of either, got {shorten(prompt)}", "prompt")
    elif all(_is_int(item) for item in prompt):
        parts = [prompt]
    elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        parts = prompt
    else:
        raise RequestError("prompt must hold only text, only token ids or only lists of token ids", "prompt")
    if len(parts) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(parts)} prompts, at most {MAX_PROMPTS} are accepted", "prompt")
    return [await _part(tokenizer, part, add_special_tokens) for part in parts]


async def _part(tokenizer: Tokenizer, part: str | list[Any], add_special_tokens: bool) -> list[int]:
    if isinstance(part, str):
        return await offload(len(part), lambda: tokenizer.encode(part, add_special_tokens=add_special_tokens))
    wrong = [item for item in part if not _is_int(item)]
    if wrong:
        raise RequestError(f"prompt must hold token ids (integers), got {shorten(wrong[0])}", "prompt")
    return part


async def chat_prompt(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: dict[str, Any],
) -> list[int]:
    """Token ids of a conversation, by the model's chat template.

    Raises:
        RequestError: no template, a malformed message, or the template refuses.
    """
    if not tokenizer.has_chat_template:
        raise RequestError("messages: this model has no chat template; use /v1/completions", "messages")
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message=true needs add_generation_prompt=false: the last message is either gone on with or "
            "answered",
            "continue_final_message",
        )
    if taken := RESERVED_KWARGS & template_kwargs.keys():
        raise RequestError(f"chat_template_kwargs must not hold {sorted(taken)[0]!r}", "chat_template_kwargs")
    clean = [_message(index, message) for index, message in enumerate(messages)]
    size = sum(len(message["content"]) for message in clean)

    def apply() -> list[int]:
        return tokenizer.apply_chat_template(
            clean,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )

    try:
        return await offload(size, apply)
    except RequestError as error:
        raise RequestError(str(error), error.param or "messages") from None


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]."
    message = served_fields(message, ("role", "content", "name"), MESSAGE_NOT_SERVED, where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}role must be a name such as 'user', got {shorten(role)}", f"{where}role")
    if role in ("tool", "function"):
        raise RequestError(f"{where}role={role!r} is not served yet: tools are not served", f"{where}role")
    if not isinstance(message.get("name", ""), str):
        raise RequestError(f"{where}name must be a string", f"{where}name")
    return message | {"content": _content(f"{where}content", message.get("content"))}


def _content(where: str, content: Any) -> str:
    """Text, or a list of text parts, which are joined by newlines as vLLM joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where} must be text or a list of text parts, got {shorten(content)}", where)
    return "\n".join(_text_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _text_part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where} must be an object with a type, got {shorten(part)}", where)
    if part["type"] != "text":
        raise RequestError(f"{where}.type={shorten(part['type'])} is not served: this server takes text only", where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text must be a string, got {shorten(part.get('text'))}", where)
    if unknown := part.keys() - {"type", "text"}:
        raise RequestError(f"unknown field {f'{where}.{min(unknown)[:100]}'!r}", where)
    return str(part["text"])


def check_prompt(token_ids: Sequence[int], field: str, vocab_size: int, max_model_len: int) -> None:
    """
    Raises:
        RequestError: no token, an id out of the vocabulary, or no room for a single token of output.
    """
    if not token_ids:
        raise RequestError(f"{field} is empty: it gives no tokens, and there is nothing to go on from", field)
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"{field} has {len(token_ids)} tokens, which leaves no room for output: max_model_len is {max_model_len}",
            field,
        )
    check_token_ids(token_ids, field, vocab_size)


def check_token_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise RequestError(f"{field}: token id {shorten(wrong)} is not in the vocabulary [0, {vocab_size})", field)


async def offload(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
