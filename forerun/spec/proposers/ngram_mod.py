"""A hash pool of n-grams that requests share: look up what followed the last n tokens, and go on from there. No torch.

The idea is llama.cpp's ngram-mod: nothing is searched and nothing exact is kept, so that time and memory are constant
however much was seen. A stale or mistaken entry costs acceptance, never correctness.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from forerun.spec.proposer import RequestDraft
from forerun.spec.proposers.history import HistoryIndex, HistoryProposer

if TYPE_CHECKING:
    from forerun.request import Request
    from forerun.spec.config import MethodConfig

# Pools of all salts together may take as much as so many full ones.
MAX_FULL_POOLS: Final = 8
# Slots that are looked at for one n-gram, at most: at a load of a half more are needed once in a thousand times, if
# nobody has chosen tokens to make it happen.
MAX_PROBES: Final = 32

_MODULUS: Final = (1 << 61) - 1
_BASE: Final = 0x0B5A_D4EC_EDA1_CE2B  # any number below the modulus whose powers do not soon repeat
_KEY_BITS: Final = 40  # of the hash, in a slot
_KEY: Final = (1 << _KEY_BITS) - 1
_MAX_TOKEN: Final = (1 << 64 - _KEY_BITS) - 2
_SLOT_BYTES: Final = 8
_FIRST_SLOTS: Final = 64
_MOVED_PER_PUT: Final = 4
_OBJECT_BYTES: Final = 1024  # of a pool without its slots, and its place among the others


class NgramModProposer(HistoryProposer):
    """Drafts as long as the pool knows what followed the last `n_match` tokens, drafted ones included.

    Prompts and answers enter the pool of their request's salt as they are computed, and every request of this salt
    drafts from it. Pools grow with what they hold; where all take more than `MAX_FULL_POOLS` full ones, that of the
    salt that was not used for longest is given up. So a client that sends a new salt with each request costs
    others their pools at worst, as it costs them their prefixes, and never memory.

    Args:
        n_match: tokens of an n-gram.
        n_min: where the pool knows fewer tokens to come than this, nothing is drafted. A short chain is a sign of
            chance, so what counts is how far the pool knows, not how far the request may draft.
        pool_bytes: most memory of one salt's pool; 64 at the least.
        num_speculative_tokens: most tokens drafted.
    """

    name = "ngram_mod"

    def __init__(self, n_match: int, n_min: int, pool_bytes: int, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self.n_match = n_match
        self.n_min = n_min
        self.pools = NgramPools(pool_bytes, MAX_FULL_POOLS * pool_bytes)

    @classmethod
    def from_config(cls, config: MethodConfig) -> NgramModProposer:
        return cls(
            config.ngram_mod_n_match,
            config.ngram_mod_n_min,
            config.ngram_mod_pool_bytes,
            config.max_draft_tokens,
        )

    def new_index(self, request: Request) -> NgramModIndex:
        return NgramModIndex(self.pools, request.cache_salt, self.n_match, self.n_min)

    def finish(self, request: Request, index: HistoryIndex, token_ids: Sequence[int]) -> None:
        if index.num_tokens == request.num_tokens:
            index.extend([*request.token_ids, *token_ids], request.num_tokens + len(token_ids))

    @property
    def state_bytes(self) -> int:
        return super().state_bytes + self.pools.num_bytes


class NgramModIndex:
    """How far a request has entered its salt's pool, and the rolling hash of its last n tokens.

    A pool that was given up meanwhile is begun anew, with what comes from here on.
    """

    __slots__ = ("_hash", "_leaving", "_n_match", "_n_min", "_pools", "_salt", "num_tokens")

    def __init__(self, pools: NgramPools, salt: str, n_match: int, n_min: int) -> None:
        self._pools = pools
        self._salt = salt
        self._n_match = n_match
        self._n_min = n_min
        self._hash = 0
        self._leaving = pow(_BASE, n_match, _MODULUS)  # weight of the token that leaves the window
        self.num_tokens = 0

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        """Enter what followed each n-gram up to `end`."""
        n, key, leaving, put = self._n_match, self._hash, self._leaving, self._pools.open(self._salt).put
        for place in range(self.num_tokens, end):
            token = token_ids[place]
            key_after = key * _BASE + token
            if place >= n:
                put(key, token)
                key_after -= leaving * token_ids[place - n]
            key = key_after % _MODULUS
        self._hash = key
        self.num_tokens = end
        self._pools.settle(self._salt)

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> RequestDraft:
        """The chain of tokens that the pool knows, cut to `max_tokens`; empty if it knows fewer than `n_min`."""
        n, key, pool = self._n_match, self._hash, self._pools.find(self._salt)
        tokens: list[int] = []
        if pool is not None and self.num_tokens >= n:
            window = list(token_ids[-n:])
            for place in range(max(max_tokens, self._n_min)):
                token = pool.find(key)
                if token < 0:
                    break
                window.append(token)
                key = (key * _BASE + token - self._leaving * window[place]) % _MODULUS
            tokens = window[n:]
        if len(tokens) < self._n_min:
            tokens = []
        return RequestDraft(tokens[:max_tokens], NgramModProposer.name)

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self) + 3 * sys.getsizeof(_MODULUS)


class NgramPools:
    """The pools of all salts.

    Args:
        pool_bytes: most memory of one.
        max_bytes: most memory of all; not less than that.
    """

    def __init__(self, pool_bytes: int, max_bytes: int) -> None:
        assert pool_bytes <= max_bytes
        self.pool_bytes = pool_bytes
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._pools: OrderedDict[str, NgramPool] = OrderedDict()  # the least recently used first
        self._bytes: dict[str, int] = {}  # of each, as counted in `num_bytes`

    def __len__(self) -> int:
        return len(self._pools)

    def find(self, salt: str) -> NgramPool | None:
        pool = self._pools.get(salt)
        if pool is not None:
            self._pools.move_to_end(salt)
        return pool

    def open(self, salt: str) -> NgramPool:
        """The salt's pool, a new one where it has none. Call `settle` after putting into it."""
        pool = self.find(salt)
        if pool is None:
            pool = self._pools[salt] = NgramPool(self.pool_bytes)
            self._bytes[salt] = 0
        return pool

    def settle(self, salt: str) -> None:
        """Count what a pool has grown by, and give up others where all have become too many."""
        held = self._pools[salt].num_bytes + _OBJECT_BYTES + sys.getsizeof(salt)
        self.num_bytes += held - self._bytes[salt]
        self._bytes[salt] = held
        while self.num_bytes > self.max_bytes and len(self._pools) > 1:
            given_up, _ = self._pools.popitem(last=False)
            self.num_bytes -= self._bytes.pop(given_up)


class NgramPool:
    """Which token followed an n-gram last, by the n-gram's hash.

        slot, 64 bits: | token + 1 (24) | lowest bits of the hash (40) |     0: free

    Open addressing, at most half full. A table that is half full becomes the older one, and a newer one begins: of
    twice the size, into which each `put` moves a few slots of the older one, until there is nothing left of it; or, at
    full size, of the same, and the older one is dropped when the newer is half full in turn. So no call does more
    work than another by more than a constant, and what goes is what was seen longest ago.
    """

    __slots__ = ("_max_slots", "_moved", "_newer", "_older")

    def __init__(self, max_bytes: int) -> None:
        self._max_slots = 1 << (max_bytes // (2 * _SLOT_BYTES)).bit_length() - 1  # two tables of this size fit
        self._newer = _Table(min(_FIRST_SLOTS, self._max_slots))
        self._older: _Table | None = None
        self._moved: int | None = None  # slots of the older table that are done with; None: it is not to be moved

    def find(self, key: int) -> int:
        """The token that followed, -1 if none is known."""
        token = self._newer.find(key)
        return self._older.find(key) if token < 0 and self._older is not None else token

    def put(self, key: int, token: int) -> None:
        """Note what followed. Ids above 24 bits are left out."""
        if token > _MAX_TOKEN:
            return
        self._newer.put(key, token)
        if self._moved is not None:
            self._move()
        if self._newer.is_half_full:
            self._begin_table()

    def _begin_table(self) -> None:
        num_slots = min(2 * self._newer.num_slots, self._max_slots)
        self._moved = 0 if num_slots > self._newer.num_slots else None
        self._older, self._newer = self._newer, _Table(num_slots)

    def _move(self) -> None:
        """Take over a few more slots of the older table, where the newer one has nothing newer."""
        assert self._older is not None
        assert self._moved is not None
        for word in self._older.slots[self._moved : self._moved + _MOVED_PER_PUT]:
            if word and self._newer.find(word & _KEY) < 0:
                self._newer.put(word & _KEY, (word >> _KEY_BITS) - 1)
        self._moved += _MOVED_PER_PUT
        if self._moved >= self._older.num_slots:
            self._older = self._moved = None

    @property
    def num_bytes(self) -> int:
        older = self._older.num_slots if self._older is not None else 0
        return (self._newer.num_slots + older) * _SLOT_BYTES


class _Table:
    """Open addressing with linear probing; a power of two of slots."""

    __slots__ = ("_mask", "_num_used", "num_slots", "slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots = np.zeros(num_slots, np.uint64).data  # large ones take memory as they are used
        self._mask = num_slots - 1
        self._num_used = 0

    @property
    def is_half_full(self) -> bool:
        return 2 * self._num_used >= self.num_slots

    def find(self, key: int) -> int:
        slots, mask = self.slots, self._mask
        for at in range(key & _KEY, (key & _KEY) + MAX_PROBES):
            word = slots[at & mask]
            if not word:
                return -1
            if not (word ^ key) & _KEY:
                return (word >> _KEY_BITS) - 1
        return -1

    def put(self, key: int, token: int) -> None:
        """Overwrites what the key had; where all that may be probed is taken, the first of it."""
        slots, mask, key = self.slots, self._mask, key & _KEY
        for at in range(key, key + MAX_PROBES):
            word = slots[at & mask]
            if not word:
                self._num_used += 1
                break
            if not (word ^ key) & _KEY:
                break
        else:
            at = key
        slots[at & mask] = (token + 1) << _KEY_BITS | key
