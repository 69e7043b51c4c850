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
