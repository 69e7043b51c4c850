"""Noise that depends on nothing but its key: the counter-based generator Philox4x32-10.

The draw of a request at an output position is the same in any batch, at any time, with any draft.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import enum
import math
from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MOST_NOISE = -math.log(-math.log(1 - 2.0**-33))  # about 22.9
LEAST_NOISE = -math.log(33 * math.log(2))  # about -3.1

Word = TypeVar("Word", int, Tensor)


class Stream(enum.IntEnum):
    """Which use random numbers are for: part of the counter's last word, so that streams are independent.

    Within a stream a position may have several `place`s: numbers of a draft that must not come again when a later draft
    reaches the same output position are keyed by the position of the draft's root and the place in it.
    """

    TARGET = 0  # the target's draws, and those of drafts that are coupled to them
    DRAFT = 1  # a draft's own draws
    ACCEPT = 2  # whether a drafted token is accepted

    def word(self, place: int) -> int:
        """The counter's last word; `place` is below 2^24."""
        return int(self) | place << 8


def philox(counter: tuple[Tensor, int, int, int], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for every element of the first counter word.

    Args:
        counter: four 32-bit words; the first is an int64 tensor [N].
        key: two 32-bit words.
    Returns:
        Four int64 tensors [N] with values in [0, 2^32).
    """
    first, *rest = counter
    c1, c2, c3 = (torch.full_like(first, word) for word in rest)
    return _rounds(first, c1, c2, c3, key)


def _rounds(c0: Word, c1: Word, c2: Word, c3: Word, key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """The generator itself, on tensors or, without their overhead, on four plain numbers."""
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap; their 64 bits are those of the unsigned product
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK) ^ c1 ^ k0,
            product1 & MASK,
            ((product0 >> 32) & MASK) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def _key(seed: int) -> tuple[int, int]:
    return seed & MASK, (seed >> 32) & MASK


def gumbel(
    seed: int, choice: int, position: int, token_ids: Tensor, stream: Stream = Stream.TARGET, place: int = 0
) -> Tensor:
    """Gumbel noise of tokens at one output position: a pure function of its arguments, token by token.

    Args:
        token_ids: [N] int64.
    Returns:
        [N] float64, between LEAST_NOISE and MOST_NOISE.
    """
    span = int(token_ids.max()) // 4 + 1  # four tokens share a counter
    dense = token_ids.shape[0] > span
    counters = torch.arange(span, device=token_ids.device) if dense else token_ids >> 2
    words = torch.stack(philox((counters, position, choice, stream.word(place)), _key(seed)), dim=1)
    own = words.flatten()[token_ids] if dense else words.gather(1, (token_ids & 3).unsqueeze(1)).squeeze(1)
    uniform = (own.double() + 0.5) / 2.0**32  # in (0, 1), never 0 or 1
    return -torch.log(-torch.log(uniform))


def uniform(seed: int, choice: int, position: int, stream: Stream, place: int = 0) -> float:
    """One number in [0, 1), of 53 bits, at an output position: a pure function of its arguments."""
    first, second, _, _ = _rounds(0, position, choice, stream.word(place), _key(seed))
    return ((first << 21) | (second >> 11)) / 2.0**53
