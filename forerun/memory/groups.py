"""What a group of caches needs, as numbers. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What one group keeps for every block of tokens.

    Attributes:
        name: "target", or the proposer's name.
        block_bytes: bytes of one block over all layers of the group.
        max_tokens: of one request that it can hold; a proposer's context may be shorter than the target's.
        method: of the proposer, as a request may name it.
        beside_target: it has no blocks of its own: each block of the target has so many bytes beside it, in memory of
            their own, for rows at the target's slots. So prefixes, preemption and the end of a request need no more.
        scratch_tokens: beside the target: slots after the known tokens that it writes while it drafts, at most.
    """

    name: str
    block_bytes: int
    max_tokens: int = 2**31
    method: str = ""
    beside_target: bool = False
    scratch_tokens: int = 0


def chunk_bytes(groups: Sequence[GroupSpec]) -> int:
    """The least memory that every one of these groups, which share a pool, can view as whole blocks of its own."""
    return math.lcm(*(group.block_bytes for group in groups))


def num_chunks(groups: Sequence[GroupSpec], total_bytes: int, beside_bytes: int = 0) -> int:
    """Chunks that so much memory gives to a pool.

    Args:
        groups: those with blocks of their own, the target's first.
        beside_bytes: of other memory that each block of the target needs.
    """
    chunk = chunk_bytes(groups)
    return max(0, total_bytes) // (chunk + chunk // groups[0].block_bytes * beside_bytes)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """What all caches of an engine need.

    Attributes:
        block_size: tokens a block.
        groups: the target's first.
    """

    block_size: int
    groups: tuple[GroupSpec, ...]

    @property
    def own(self) -> tuple[GroupSpec, ...]:
        """Those with blocks of their own, which share a pool."""
        return tuple(group for group in self.groups if not group.beside_target)

    @property
    def beside_bytes(self) -> int:
        """What lies beside each block of the target."""
        return sum(group.block_bytes for group in self.groups if group.beside_target)

    @property
    def block_bytes(self) -> int:
        """Of a block that every request needs: the target's and what lies beside it."""
        return self.groups[0].block_bytes + self.beside_bytes

    @property
    def draft_block_bytes(self) -> int:
        """What a request needs more for each of its blocks while it drafts: the other groups' own."""
        return sum(group.block_bytes for group in self.own[1:])

    @property
    def token_bytes(self) -> int:
        """Of a token of a request that drafts."""
        return (self.block_bytes + self.draft_block_bytes) // self.block_size

    def num_tokens(self, total_bytes: int) -> int:
        """Tokens that fit where no request drafts with a cache of its own: what the engine calls the cache's size."""
        own = self.own
        blocks = num_chunks(own, total_bytes, self.beside_bytes) * (chunk_bytes(own) // own[0].block_bytes)
        return blocks * self.block_size

    def num_drafting_tokens(self, total_bytes: int) -> int:
        """Tokens that fit where all requests draft."""
        return max(0, total_bytes) // (self.block_bytes + self.draft_block_bytes) * self.block_size

    def request_bytes(self, num_tokens: int) -> tuple[int, int]:
        """What a request of this length takes: in any case, and more while it drafts."""
        blocks = -(-num_tokens // self.block_size)
        return blocks * self.block_bytes, blocks * self.draft_block_bytes
