"""What may follow in one text: its reasoning, its grammar and its end, with a way back from tokens on trial."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from forerun.spec.proposer import RequestDraft
from forerun.structured.reasoning import EndTag

WORD = 32  # ids a word of a mask
MAX_RENEWALS = 8  # each compiles the grammar again
Mask = NDArray[np.int32]
T = TypeVar("T")


@dataclass(slots=True)
class Guide:
    """Follows one text.

    `push` and `pop` walk along tokens on trial, `commit` takes those that stand. A state is the number of bytes of the
    reasoning's end tag that were seen, or one of the two below.

    Copies of a matcher share the states of their automaton, so that other texts may have used up what one may have:
    a matcher that cannot go on is replaced by a fresh one, and only what that one cannot do either is an error.

    Attributes:
        matcher: at the beginning of the grammar.
        fresh: makes one that shares nothing.
        end_tag: what ends the reasoning that the text begins with; None: the grammar begins at once.
        eos_ids: the tokens that end a text: allowed where the grammar may stop.
        ignore_eos: allow them only where it must.
        error: why the text cannot go on; "" while it can.
        trial_error: the same of a token on trial in the last walk.
    """

    matcher: LLMatcher
    fresh: Callable[[], LLMatcher]
    end_tag: EndTag | None
    eos_ids: Sequence[int]
    ignore_eos: bool = False
    error: str = ""
    trial_error: str = ""
    _state: int = 0
    _trail: list[tuple[int, int | None]] = field(default_factory=list)  # state before, token if the matcher has it
    _taken: list[int] = field(default_factory=list)  # what the matcher has of what stands
    _num_renewals: int = 0

    GRAMMAR = -1
    ENDED = -2

    def __post_init__(self) -> None:
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
        before = self._state
        taken: int | None = None
        if before == self.ENDED:
            return False
        if token_id in self.eos_ids:
            if not self._may_end():
                return False
            self._state = self.ENDED
        elif before == self.GRAMMAR:
            if self._ask(lambda matcher: matcher.try_consume_tokens([token_id])) != 1:
                return False
            taken = token_id
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
        if taken is not None:
            self.matcher.rollback(1)

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens stand; nothing may be on trial."""
        assert not self._trail
        for token_id in token_ids:
            if not self.push(token_id):
                if not self.error and self._state != self.ENDED:
                    self.error = f"the grammar does not allow token {token_id}, which was drawn"
                break
        self._taken += [token for _, token in self._trail if token is not None]
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
        if not self.constrained:
            return []
        tokens: list[int] = []
        for token_id in self._ask(LLMatcher.compute_ff_tokens)[:most]:
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
        if self._state != self.GRAMMAR:
            return not self.ignore_eos
        if not self._ask(LLMatcher.is_accepting):
            return False
        return not self.ignore_eos or not _without(self._allowed(), self.eos_ids).any()

    def _fill_from_grammar(self, mask: Mask) -> None:
        mask[:] = 0
        allowed = self._allowed()[: len(mask)]
        if self.matcher.is_error():
            reason = " ".join(self.matcher.get_error().replace("<non-verbose/>", "").split())
            if self._trail:
                self.trial_error = reason
            else:
                self.error = self.error or reason
            return
        mask[: len(allowed)] = allowed
        if self.ignore_eos and (others := _without(mask, self.eos_ids)).any():
            mask[:] = others

    def _allowed(self) -> Mask:
        return np.frombuffer(self._ask(LLMatcher.compute_bitmask), np.int32)

    def _ask(self, question: Callable[[LLMatcher], T]) -> T:
        """The answer of the matcher, or of a fresh one where it cannot go on. It is in its error state afterwards where
        that one cannot either."""
        answer = question(self.matcher)
        if self.matcher.is_error() and self._renew():
            answer = question(self.matcher)
        return answer

    def _renew(self) -> bool:
        if self._num_renewals == MAX_RENEWALS:
            return False
        self._num_renewals += 1
        self.matcher = self.fresh()
        self.matcher.try_consume_tokens(self._taken + [token for _, token in self._trail if token is not None])
        return True

    def _go_back(self) -> None:
        """Take back all that is on trial, also where it has led to what cannot be gone back from."""
        while self._trail:
            self.pop()
        if self.matcher.is_error():
            self._renew()


def _clear(mask: Mask, token_ids: Collection[int]) -> None:
    bits = mask.view(np.uint32)
    for token_id in token_ids:
        if token_id // WORD < len(bits):
            bits[token_id // WORD] &= ~np.uint32(1 << token_id % WORD)


def _without(mask: Mask, token_ids: Collection[int]) -> Mask:
    rest = mask.copy()
    _clear(rest, token_ids)
    return rest
