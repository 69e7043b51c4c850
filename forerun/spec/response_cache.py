"""Answers of finished requests, for drafts of later ones to copy from; apart by salt, and bounded. No torch here.

Holds answers and no prompts, and of an answer nothing before it has ended.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from forerun.spec.suffix_tree import NO_SPECULATION, Speculation, SuffixTree

_OBJECT_BYTES: Final = 2048  # of a generation without what its tree and salt tell, and of its places in the tables


class Generation:
    """Answers of one salt that came one after another, in one tree, and that are forgotten together."""

    def __init__(self, salt: str, tree: SuffixTree) -> None:
        self.salt = salt
        self.tree = tree
        self.num_requests = 0
        self.num_bytes = _OBJECT_BYTES + sys.getsizeof(salt)


class ResponseCache:
    """Remembers the newest answers, and continues a text as they most often went on.

    A suffix tree forgets as a whole, so answers are kept in generations: one that holds half of what there may be, in
    number or in bytes, is closed, and the salt's next answer begins another. Where all salts together have too much,
    the generation goes whose last answer is the oldest. So there are never more than `max_requests` answers,
    and as long as bytes do not bind and there is one salt, never fewer than the newest half of these. Each token is
    entered once, and a continuation asks at most the few generations of one salt.

    Args:
        make_tree: an empty tree.
        max_requests: most answers remembered, of all salts.
        max_bytes: most memory, of all salts; a step may pass it by what it enters.
    """

    def __init__(self, make_tree: Callable[[], SuffixTree], max_requests: int, max_bytes: int) -> None:
        self._make_tree = make_tree
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.num_requests = 0
        self.num_bytes = 0
        self._by_salt: dict[str, list[Generation]] = {}  # of each, the newest last; all but that one are closed
        self._by_age: OrderedDict[Generation, None] = OrderedDict()  # by the last answer, the oldest first
        self._waiting: deque[tuple[str, array[int]]] = deque()
        self._num_entered = 0  # tokens of the first one that waits

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Remember an answer. It waits for `enter`."""
        if token_ids and self.max_requests > 0:
            tokens = array("i", token_ids)
            self._waiting.append((salt, tokens))
            self.num_bytes += _waiting_bytes(salt, tokens)
            self._evict()

    def enter(self, max_tokens: int) -> None:
        """Take up to `max_tokens` tokens of waiting answers in; call it once a step."""
        while max_tokens > 0 and self._waiting:
            salt, tokens = self._waiting[0]
            generation = self._open_generation(salt, new_answer=self._num_entered == 0)
            part = tokens[self._num_entered : self._num_entered + max_tokens]
            generation.tree.extend(part)
            max_tokens -= len(part)
            self._num_entered += len(part)
            if self._num_entered == len(tokens):
                self._forget_waiting()
            self._recount(generation)
            self._evict()

    def speculate(self, salt: str, token_ids: Sequence[int], max_tokens: int) -> Speculation:
        """The continuation of `token_ids` with the highest score; of equal ones the newest generation's."""
        best = NO_SPECULATION
        for generation in reversed(self._by_salt.get(salt, ())):
            found = generation.tree.speculate_after(token_ids, max_tokens)
            if found.score > best.score:
                best = found
        return best

    def _open_generation(self, salt: str, *, new_answer: bool) -> Generation:
        """The generation that takes the salt's next tokens, as the youngest of all."""
        generations = self._by_salt.setdefault(salt, [])
        if not generations or (new_answer and self._is_full(generations[-1])):
            generations.append(Generation(salt, self._make_tree()))
            self.num_bytes += generations[-1].num_bytes
        generation = generations[-1]
        self._by_age[generation] = None
        self._by_age.move_to_end(generation)
        if new_answer or not generation.num_requests:  # not new: its beginning was evicted
            generation.tree.end_sequence()
            generation.num_requests += 1
            self.num_requests += 1
        return generation

    def _is_full(self, generation: Generation) -> bool:
        return 2 * generation.num_requests >= self.max_requests or 2 * generation.num_bytes >= self.max_bytes

    def _recount(self, generation: Generation) -> None:
        held = _OBJECT_BYTES + sys.getsizeof(generation.salt) + generation.tree.num_bytes
        self.num_bytes += held - generation.num_bytes
        generation.num_bytes = held

    def _evict(self) -> None:
        while self._by_age and (self.num_requests > self.max_requests or self.num_bytes > self.max_bytes):
            generation, _ = self._by_age.popitem(last=False)
            generations = self._by_salt[generation.salt]
            generations.remove(generation)
            if not generations:
                del self._by_salt[generation.salt]
            self.num_requests -= generation.num_requests
            self.num_bytes -= generation.num_bytes
        while self._waiting and (len(self._waiting) > self.max_requests or self.num_bytes > self.max_bytes):
            self._forget_waiting()

    def _forget_waiting(self) -> None:
        """Drop the answer that waits first."""
        self.num_bytes -= _waiting_bytes(*self._waiting.popleft())
        self._num_entered = 0


def _waiting_bytes(salt: str, tokens: array[int]) -> int:
    return sys.getsizeof(salt) + sys.getsizeof(tokens)
