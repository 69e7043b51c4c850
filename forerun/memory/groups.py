"""What a group of caches needs, as numbers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What one group keeps for every block of tokens.

    Attributes:
        name: "target", or the proposer's name.
        block_bytes: bytes of one block over all layers of the group.
        max_tokens: of one request that it can hold; a proposer's context may be shorter than the target's.
        method: of the proposer, as a request may name it.
    """

    name: str
    block_bytes: int
    max_tokens: int = 2**31
    method: str = ""
