"""How many tokens to draft. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forerun.request import Request


class Control(Protocol):
    """Chooses how far each decoding request may draft in the next step."""

    def lengths(self, requests: Sequence[Request]) -> dict[str, int]:
        """Most tokens to draft, by request id; a request that is absent must not draft."""
        ...


class FixedLength:
    """The same length for everybody: K, or less where a request asks for less."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def lengths(self, requests: Sequence[Request]) -> dict[str, int]:
        return {
            r.request_id: self.num_speculative_tokens
            if r.max_draft_tokens is None
            else min(self.num_speculative_tokens, r.max_draft_tokens)
            for r in requests
        }
