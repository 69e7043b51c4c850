"""The two forms of log-probabilities: that of completions and that of chat. One entry a token in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.server.job import Choice
from forerun.server.prompts import Tokenizer
from forerun.spec.verifier import TokenLogprobs

LOWEST = -9999.0  # JSON has no infinity


def completion_logprobs(
    tokenizer: Tokenizer, choice: Choice, entries: Sequence[TokenLogprobs], opening: int | None = None
) -> dict[str, Any]:
    """Moves `choice.text_offset` past the entries' tokens.

    Args:
        opening: the first token of an echoed prompt: nothing stands before it, so that it has no log-probability.
    """
    before = [] if opening is None else [opening]
    tokens = [tokenizer.token_text(token_id) for token_id in (*before, *(entry.token_id for entry in entries))]
    nothing = [None] * len(before)
    offsets = []
    for token in tokens:
        offsets.append(choice.text_offset)
        choice.text_offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [*nothing, *(_finite(entry.logprob) for entry in entries)],
        "tokens": tokens,
        "top_logprobs": [*nothing, *(_by_text(tokenizer, entry) for entry in entries)],
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    return {
        "content": [
            _chat_token(tokenizer, entry.token_id, entry.logprob)
            | {"top_logprobs": [_chat_token(tokenizer, i, logprob) for i, logprob in entry.top[:num_top]]}
            for entry in entries
        ]
    }


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt, by token id; the first has none."""
    return [None, *(_by_id(tokenizer, entry) for entry in entries)]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    """The token itself, with its rank among all, and the most likely ones."""
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(i, logprob, rank) for rank, (i, logprob) in enumerate(entry.top, 1) if i != entry.token_id]
    return {
        str(i): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(i)}
        for i, logprob, rank in ranked
    }


def _by_text(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens and the drawn one. Of two with the same text the drawn, else the likelier, stays."""
    by_text = {tokenizer.token_text(entry.token_id): _finite(entry.logprob)}
    for token_id, logprob in entry.top:
        by_text.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return by_text


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
