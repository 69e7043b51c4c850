"""What may follow in one text: its reasoning, its grammar and its end, with a way back from tokens on trial."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from forerun.spec.proposer import RequestDraft
from forerun.structured.reasoning import EndTag

WORD = 32  # ids a word of a mask
Mask = NDArray[np.int32]


@dataclass(slots=True)
class Guide:
    """Follows one text.

    `push` and `pop` walk along tokens on trial, `commit` takes those that stand. A state is the number of bytes of the
    reasoning's end tag that were seen, or one of the two below.

    Attributes:
        matcher: at the beginning of the grammar.
        end_tag: what ends the reasoning that the text begins with; None: the grammar begins at once.
        eos_ids: the tokens that end a text: allowed where the grammar may stop.
        ignore_eos: allow them only where it must.
        error: why the text cannot go on; "" while it can.
        trial_error: the same of a token on trial in the last walk.
    """

    matcher: LLMatcher
    end_tag: EndTag | None
    eos_ids: Sequence[int]
    ignore_eos: bool = False
    error: str = ""
    trial_error: str = ""
    _state: int = 0
    _trail: list[tuple[int, bool]] = field(default_factory=list)  # (state before, whether the matcher took the token)
    _taken: list[int] = field(default_factory=list)  # what the matcher took of what stands
    _origin: LLMatcher | None = None

    GRAMMAR = -1
    ENDED = -2

    def __post_init__(self) -> None:
        self._origin = self.matcher.deep_copy()
        if self.end_tag is None:
            self._state = self.GRAMMAR

    @property
    def constrained(self) -> bool:
        """Reasoning has ended, the text has not."""
        return self._state == self.GRAMMAR

    @property
    def num_on_trial(self) -> int:
        return len(self._trail)

    def push(self, token_id: int) -> bool:
        """Go along a token. False, and nothing changes, where it is not allowed."""
        before, taken = self._state, False
        if before == self.ENDED:
            return False
        if token_id in self.eos_ids:
            if before == self.GRAMMAR and not self._may_end():
                return False
            self._state = self.ENDED
        elif before == self.GRAMMAR:
            taken = not self.matcher.is_error() and self.matcher.try_consume_tokens([token_id]) == 1
            if not taken:
                return False
        else:
            assert self.end_tag is not None
            if token_id in self.end_tag.joined(before):
                return False
            state = self.end_tag.after(before, token_id)
            self._state = self.GRAMMAR if state == self.end_tag.length else state
        self._trail.append((before, taken))
        return True

    def pop(self) -> None:
        """Take the last `push` that succeeded back."""
        self._state, taken = self._trail.pop()
        if taken:
            self.matcher.rollback(1)

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens stand; nothing may be on trial."""
        assert not self._trail
        for token_id in token_ids:
            if not self.push(token_id):
                if not self.error and self._state != self.ENDED:
                    self.error = f"the grammar does not allow token {token_id}, which was drawn"
                break
            self._taken += [token_id] if self._trail[-1][1] else []
        self._trail.clear()

    def fill(self, mask: Mask) -> None:
        """Which tokens may follow here: bit i % 32 of word i // 32 of `mask` [words] is for id i."""
        mask[:] = -1
        if self._state == self.GRAMMAR:
            self._fill_from_grammar(mask)
        elif self._state != self.ENDED:  # after the end nothing is drawn
            assert self.end_tag is not None
            _clear(mask, self.end_tag.joined(self._state))
            if self.ignore_eos:
                _clear(mask, self.eos_ids)

    def forced(self, most: int) -> list[int]:
        """Tokens that the grammar leaves no choice about, from here on, at most so many. Their text is forced; the
        tokens are those that the tokenizer writes it with. The end is one of them."""
        if not self.constrained or self.matcher.is_error():
            return []
        tokens: list[int] = []
        for token_id in self.matcher.compute_ff_tokens()[:most]:
            if not self.push(token_id):
                break
            tokens.append(token_id)
        if len(tokens) < most and self.matcher.is_stopped() and not self.matcher.is_error():
            tokens.append(self.eos_ids[0])
        self._go_back()
        return tokens

    def walk(self, draft: RequestDraft) -> Iterator[int]:
        """Stand behind each node of a draft that is allowed, the root (-1) first; all is taken back at the end."""
        children: dict[int, list[int]] = {}
        for node in range(len(draft)):
            children.setdefault(draft.parent(node), []).append(node)
        path: list[int] = []
        self.trial_error = ""
        try:
            yield -1
            ahead = children.get(-1, [])[::-1]
            while ahead:
                node = ahead.pop()
                while path and path[-1] != draft.parent(node):
                    self.pop()
                    path.pop()
                if self.push(draft.tokens[node]):
                    path.append(node)
                    yield node
                    ahead += children.get(node, [])[::-1]
        finally:
            self._go_back()

    def _may_end(self) -> bool:
        if not self.matcher.is_accepting():
            return False
        if not self.ignore_eos or self.matcher.is_stopped():
            return True
        return not _without(np.frombuffer(self.matcher.compute_bitmask(), np.int32).copy(), self.eos_ids).any()

    def _fill_from_grammar(self, mask: Mask) -> None:
        mask[:] = 0
        if not self.matcher.is_error():
            allowed = np.frombuffer(self.matcher.compute_bitmask(), np.int32)[: len(mask)]
            mask[: len(allowed)] = allowed
        if self.matcher.is_error():
            mask[:] = 0
            reason = " ".join(self.matcher.get_error().replace("<non-verbose/>", "").split())
            if self._trail:
                self.trial_error = reason
            else:
                self.error = self.error or reason
        elif self.ignore_eos and (others := _without(mask, self.eos_ids)).any():
            mask[:] = others

    def _go_back(self) -> None:
        """Take back all that is on trial. If it led where the grammar costs too much, which a matcher does not come
        back from, another one takes its place."""
        while self._trail:
            self.pop()
        if self.matcher.is_error() and not self.error:
            assert self._origin is not None
            self.matcher = self._origin.deep_copy()
            self.matcher.try_consume_tokens(self._taken)


def _clear(mask: Mask, token_ids: Collection[int]) -> None:
    bits = mask.view(np.uint32)
    for token_id in token_ids:
        if token_id // WORD < len(bits):
            bits[token_id // WORD] &= ~np.uint32(1 << token_id % WORD)


def _without(mask: Mask, token_ids: Collection[int]) -> Mask:
    rest = mask.copy()
    _clear(rest, token_ids)
    return rest
