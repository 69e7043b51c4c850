"""Where reasoning ends in a stream of tokens. The tag may be one token or several, or end inside of one."""

from __future__ import annotations

from collections.abc import Sequence


class EndTag:
    """Finds the first place where a text holds a tag, token by token.

    A state is how many bytes of the tag the text ends with; `length` is the end. A state is all that must be kept of a
    text, so that going back is taking an older one.

    Args:
        tag: what ends the reasoning.
        tokens: the bytes of each id.
    """

    def __init__(self, tag: str, tokens: Sequence[bytes]) -> None:
        self._tag = tag.encode()
        self._tokens = tokens
        self._borders = [0] * len(self._tag)  # of each beginning: its longest proper one that it also ends with
        length = 0
        for i in range(1, len(self._tag)):
            while length and self._tag[i] != self._tag[length]:
                length = self._borders[length - 1]
            length += self._tag[i] == self._tag[length]
            self._borders[i] = length
        self._joined: dict[int, list[int]] = {}
        self._candidates = [i for i, token in enumerate(tokens) if token[:-1].rfind(self._tag[-1:]) >= 0]

    @property
    def length(self) -> int:
        return len(self._tag)

    def after(self, state: int, token_id: int) -> int:
        """The state after a token. Bytes behind the tag are not looked at."""
        return self._feed(state, self._token(token_id))[0]

    def joined(self, state: int) -> list[int]:
        """Tokens that would end the tag and go on with more than whitespace: an answer that nothing constrained."""
        if state not in self._joined:
            self._joined[state] = [i for i in self._candidates if self._feed(state, self._tokens[i])[1].strip()]
        return self._joined[state]

    def _token(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def _feed(self, state: int, token: bytes) -> tuple[int, bytes]:
        """The state after these bytes, and what is left of them behind the tag."""
        for place, byte in enumerate(token):
            while state and byte != self._tag[state]:
                state = self._borders[state - 1]
            state += byte == self._tag[state]
            if state == len(self._tag):
                return state, token[place + 1 :]
        return state, b""
