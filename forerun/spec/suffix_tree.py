"""Counts of every short substring of texts that grow, and the most likely continuation of an end. No torch here.

Nothing is ever removed but the whole tree: whoever wants to forget keeps several (`response_cache.py`).
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# What CPython asks for, in bytes; `num_bytes` is an estimate built on them.
_INT_BYTES: Final = sys.getsizeof(1 << 20)
_DICT_BYTES: Final = sys.getsizeof({0: 0, 1: 1}) + 16  # with the collector's header
_DICT_SLOTS: Final = 5  # entries that fit into the smallest dict
_ENTRY_BYTES: Final = 48  # one more entry in a larger dict: hash, key, value and the free share of the table


@dataclass(slots=True, frozen=True)
class Speculation:
    """A guessed continuation: tokens, the chance that each is reached and stands, and the sum of those chances.

    Of two speculations, from two trees say, the one with the higher score is expected to bring more tokens.
    """

    tokens: list[int]
    probs: list[float]
    score: float


NO_SPECULATION: Final = Speculation([], [], 0.0)


class SuffixTree:
    """Answers as a suffix tree with a count at every node does, cut at `max_depth` tokens.

    `count(w)` is the number of occurrences of w, overlapping ones and the one at the end included, for every
    w of at most `max_depth` tokens. Among next tokens of equal count the one seen last is taken (in teacher-forced
    decoding of word tokens 1.509 tokens a step on Python sources, against 1.498 for the first to reach the count).
    Of several sequences, one after the other (`end_sequence`), the counts are those of all together; no substring
    reaches from one into the next.

    The tree is held as a suffix automaton cut at `max_depth`: a state stands for all substrings that end at the same
    positions (so their counts are equal), each the others' suffix, of `length[link] + 1 .. length` tokens; `link` leads
    to the next shorter suffix that ends at more positions. Hence the suffixes of the whole sequence are the states
    from `_top` along the links to the root, 0. A new token lengthens these and only these, so the cost of a token and
    of a speculation depends on the number of such states: a few in common texts, `max_depth` in periodic ones, whatever
    the length of the sequence. A tree with an active node for every suffix touches `max_depth` nodes for every token.

    A state keeps its most frequent next token at hand (`token`, `child`). `others` holds all its next tokens once
    there are two; most states have one.

    Args:
        max_depth: longest substring counted, tokens; context and continuation together fit into it.
        max_spec_factor: a context of m tokens speculates at most m * max_spec_factor tokens.
        min_token_prob: a continuation ends before the chance to reach its next token falls below this.
    """

    __slots__ = (
        "_child",
        "_count",
        "_depth",
        "_first",
        "_length",
        "_link",
        "_num_dicts",
        "_num_spilled",
        "_others",
        "_peak",
        "_token",
        "_top",
        "max_depth",
        "max_spec_factor",
        "min_token_prob",
        "num_tokens",
    )

    def __init__(self, max_depth: int, max_spec_factor: float = 1.0, min_token_prob: float = 0.1) -> None:
        self.max_depth = max_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self.num_tokens = 0
        # The context length that may speculate most: up to here the factor binds, from here on the depth does.
        self._peak = 1 + bisect_left(range(1, max_depth), True, key=lambda m: self._limit(m) == max_depth - m)

        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._count = array("i", [0])  # the root's is not kept: it is num_tokens
        self._token = array("q", [-1])
        self._child = array("i", [0])
        self._others: list[dict[int, int] | None] = [None]
        self._num_dicts = 0
        self._num_spilled = 0
        self._top = 0  # state of the last _depth tokens
        self._first = 0  # tokens of the sequences that have ended
        self._depth = 0  # min(num_tokens - _first, max_depth - 1)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the sequence. Ids are not negative."""
        length, link, count = self._length, self._link, self._count
        token, child, others = self._token, self._child, self._others
        top, depth, max_context = self._top, self._depth, self.max_depth - 1
        for x in token_ids:
            # Suffixes that x follows for the first time, the longest first: with x they make one new state.
            new = target = 0
            p = top
            while p >= 0:
                if token[p] == x:
                    target = child[p]
                    break
                nexts = others[p]
                if nexts is not None and x in nexts:
                    target = nexts[x]
                    break
                new = new or self._add_state(depth + 1, 1)
                self._add_next(p, x, new)
                p = link[p]

            # Suffixes that x has followed before. If `target` also holds substrings that do not end here, it is split.
            split = 0
            if p >= 0:
                if length[target] > length[p] + 1:
                    split = self._split(target, length[p] + 1)
                if new:
                    link[new] = split or target
            longest = new or split or target
            last = -1
            while p >= 0:
                is_best = token[p] == x
                nexts = others[p]
                if is_best:
                    state = child[p]
                else:
                    assert nexts is not None
                    state = nexts[x]
                if split and state == target:
                    state = split
                    if is_best:
                        child[p] = split
                    if nexts is not None:
                        nexts[x] = split
                if state != last:
                    count[state] += 1
                    last = state
                if not is_best and count[state] >= count[child[p]]:
                    token[p] = x
                    child[p] = state
                p = link[p]

            # The context of the next token: one longer, or as long as before with its first token dropped.
            top = longest
            if depth < max_context:
                depth += 1
            elif length[link[top]] == max_context:
                top = link[top]
            self.num_tokens += 1
        self._top, self._depth = top, depth

    def end_sequence(self) -> None:
        """What is appended from here on is another sequence."""
        self._top = self._depth = 0
        self._first = self.num_tokens

    def speculate(self, max_tokens: int) -> Speculation:
        """The continuation of the sequence with the highest score, of at most `max_tokens` tokens.

        For every context w, the last m tokens, the most frequent next token is followed time and again; the chance of
        a token is the product of count(wx)/count(w) up to it. Of equal scores the longest context's is taken.
        """
        return self._best(self._top, self._depth, 0, max_tokens)

    def speculate_after(self, token_ids: Sequence[int], max_tokens: int) -> Speculation:
        """The continuation of another text, one whose end is not counted here: as if its end were appended first.

        That is, every context of `token_ids` counts once more than it occurs here, as the end of a sequence itself does
        in `speculate`: the scores of both can be compared.
        """
        state, size = self._match(token_ids)
        return self._best(state, size, 1, max_tokens)

    def _match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The state and the length of the longest suffix that occurs here, of those that can be continued."""
        length, link, token, child, others = self._length, self._link, self._token, self._child, self._others
        state = size = 0
        for x in token_ids[max(0, len(token_ids) - self.max_depth + 1) :]:
            while True:
                if token[state] == x:
                    state, size = child[state], size + 1
                    break
                nexts = others[state]
                if nexts is not None and x in nexts:
                    state, size = nexts[x], size + 1
                    break
                if not state:
                    break
                state = link[state]
                size = length[state]
        return state, size

    def _best(self, state: int, size: int, unseen: int, max_tokens: int) -> Speculation:
        """The best continuation of the suffixes of the context of `size` tokens in `state`.

        Args:
            unseen: occurrences of the context that are not counted here.
        """
        length, link, peak = self._length, self._link, self._peak
        # All contexts of one state have one continuation, so only the one that may go farthest counts: the nearest to
        # the peak. From there on to both sides limits fall, and a score is below its limit, as a first chance is
        # below 1: once a limit is not above the best score, no context further off can do better.
        longer: list[int] = []
        while state > 0 and length[link[state]] >= peak:
            longer.append(state)
            state = link[state]
        best = NO_SPECULATION
        while state > 0:
            limit = min(max_tokens, self._limit(min(length[state], size, peak)))
            if limit <= best.score:
                break
            found = self._follow(state, unseen, limit)
            if found.score > best.score:
                best = found
            state = link[state]
        for state in reversed(longer):
            limit = min(max_tokens, self._limit(length[link[state]] + 1))
            if limit <= best.score:
                break
            found = self._follow(state, unseen, limit)
            if found.score >= best.score:
                best = found
        return best

    def _limit(self, num_context: int) -> int:
        """How many tokens a context of `num_context` tokens may speculate."""
        return int(min(num_context * self.max_spec_factor + 1e-6, self.max_depth - num_context))

    def _follow(self, state: int, unseen: int, limit: int) -> Speculation:
        count, child, token, min_prob = self._count, self._child, self._token, self.min_token_prob
        tokens: list[int] = []
        probs: list[float] = []
        prob, score = 1.0, 0.0
        occurrences = count[state] + unseen
        while len(tokens) < limit:
            following = child[state]
            if not following:
                break
            prob *= count[following] / occurrences
            if prob < min_prob:
                break
            tokens.append(token[state])
            probs.append(prob)
            score += prob
            state = following
            occurrences = count[state]
        return Speculation(tokens, probs, score)

    def _add_state(self, length: int, count: int) -> int:
        self._length.append(length)
        self._link.append(0)
        self._count.append(count)
        self._token.append(-1)
        self._child.append(0)
        self._others.append(None)
        return len(self._length) - 1

    def _add_next(self, state: int, token: int, child: int) -> None:
        """`token` follows the state's substrings for the first time."""
        best = self._child[state]
        if best:
            nexts = self._others[state]
            if nexts is None:
                self._others[state] = {self._token[state]: best, token: child}
                self._num_dicts += 1
            else:
                nexts[token] = child
                self._num_spilled += len(nexts) > _DICT_SLOTS
            if self._count[best] > 1:
                return
        self._token[state] = token
        self._child[state] = child

    def _split(self, state: int, length: int) -> int:
        """Give the state's substrings of at most `length` tokens, which are about to occur alone, one of their own."""
        upper = self._add_state(length, self._count[state])
        self._link[upper] = self._link[state]
        self._link[state] = upper
        self._token[upper] = self._token[state]
        self._child[upper] = self._child[state]
        nexts = self._others[state]
        if nexts is not None:
            self._others[upper] = nexts.copy()
            self._num_dicts += 1
            self._num_spilled += max(0, len(nexts) - _DICT_SLOTS)
        return upper

    @property
    def num_states(self) -> int:
        return len(self._length)

    @property
    def num_bytes(self) -> int:
        """Bytes held, estimated from counts (a walk over all states would cost more than it tells)."""
        arrays = (self._length, self._link, self._count, self._token, self._child)
        tables = sum(sys.getsizeof(a) for a in arrays) + sys.getsizeof(self._others)
        entries = 2 * self._num_dicts + self._num_spilled
        return tables + self._num_dicts * _DICT_BYTES + self._num_spilled * _ENTRY_BYTES + entries * _INT_BYTES

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls. Costs O(states): for tests."""
        context = self._top
        assert self._depth == min(self.num_tokens - self._first, self.max_depth - 1)
        assert self._length[self._link[context]] < self._depth <= self._length[context] if context else not self._depth
        for state in range(self.num_states):
            token, child, nexts = self._token[state], self._child[state], self._others[state]
            if state:
                link = self._link[state]
                assert self._length[link] < self._length[state] <= self.max_depth
                assert not link or self._count[link] > self._count[state]
            assert (token < 0) == (child == 0)
            if nexts is not None:
                assert len(nexts) > 1
                assert nexts[token] == child
            shortest = self._length[self._link[state]] + 1 if state else 0
            if state and shortest == self.max_depth:
                continue  # its successors are too long to be counted
            followers = list(nexts.values()) if nexts is not None else [child] if child else []
            assert not followers or self._count[child] == max(self._count[s] for s in followers)
            # Every occurrence is followed by one token, but for those at the end of a sequence.
            total = self._count[state] if state else self.num_tokens
            unfollowed = total - sum(self._count[s] for s in followers)
            assert unfollowed >= self._ends_here(state)
            assert unfollowed == self._ends_here(state) or (state and self._first)

    def _ends_here(self, state: int) -> bool:
        suffix = self._top
        while suffix > 0 and suffix != state:
            suffix = self._link[suffix]
        return suffix == state and state != 0
