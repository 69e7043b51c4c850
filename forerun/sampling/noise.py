"""Noise that depends on nothing but its key: the counter-based generator Philox4x32-10.

The draw of a request at an output position is the same in any batch, at any time, with any draft.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MOST_NOISE = -math.log(-math.log(1 - 2.0**-33))  # about 22.9
LEAST_NOISE = -math.log(33 * math.log(2))  # about -3.1

IdArray = npt.NDArray[np.int64]
WordArray = npt.NDArray[np.uint64]
NoiseArray = npt.NDArray[np.float64]


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


def philox(
    counter: tuple[Tensor, int | Tensor, int | Tensor, int | Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for every element of the counter.

    Args:
        counter: four 32-bit words; the first is an int64 tensor, and the others are such or numbers.
        key: two 32-bit words, likewise; all tensors broadcast with one another.
    Returns:
        Four int64 tensors of the shape of all together, with values in [0, 2^32).
    """
    return _rounds(*counter, key)


def _rounds(c0: Any, c1: Any, c2: Any, c3: Any, key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """The generator itself: on int64 tensors, on uint64 arrays or on plain numbers, and on a mixture of these."""
    k0, k1 = key
    for _ in range(ROUNDS):
        # Products wrap where they are signed; their 64 bits are those of the unsigned product
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
    if token_ids.is_cpu:
        return torch.from_numpy(noise_of(random_words(token_ids.numpy(), seed, choice, position, stream, place)))
    span = int(token_ids.max()) // 4 + 1  # four tokens share a counter
    dense = token_ids.shape[0] > span
    counters = torch.arange(span, device=token_ids.device) if dense else token_ids >> 2
    words = torch.stack(philox((counters, position, choice, stream.word(place)), _key(seed)), dim=1)
    own = words.flatten()[token_ids] if dense else words.gather(1, (token_ids & 3).unsqueeze(1)).squeeze(1)
    uniform = (own.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))


def random_words(token_ids: IdArray, seed: int, choice: int, position: int, stream: Stream, place: int) -> WordArray:
    """The 32-bit word of each token id [N] that its noise is made of, as uint64 [N]; numpy's arithmetic is exact."""
    if token_ids.size == 0:
        return np.empty(0, np.uint64)
    span = int(token_ids.max()) // 4 + 1  # four tokens share a counter
    dense = token_ids.size > span // 2
    counters = np.arange(span, dtype=np.uint64) if dense else (token_ids >> 2).astype(np.uint64)
    words = np.stack(_rounds(counters, position, choice, stream.word(place), _key(seed)), axis=1).ravel()
    own: WordArray = words[token_ids if dense else (token_ids & 3) + 4 * np.arange(token_ids.size)]
    return own


def noise_of(words: WordArray) -> NoiseArray:
    """The noise [N] of words. Not by torch, whose logarithms wait for threads even where N is small."""
    noise: NoiseArray = -np.log(-np.log((words.astype(np.float64) + 0.5) / 2.0**32))  # of a uniform never 0 or 1
    return noise


def least_word(noise: float) -> int:
    """No smaller word gives as much noise; a few of those that are not smaller give a little less."""
    return max(0, int(math.exp(-math.exp(-noise)) * 2.0**32) - 2)


def uniform(seed: int, choice: int, position: int, stream: Stream, place: int = 0) -> float:
    """One number in [0, 1), of 53 bits, at an output position: a pure function of its arguments."""
    first, second, _, _ = _rounds(0, position, choice, stream.word(place), _key(seed))
    number: int = (first << 21) | (second >> 11)
    return number / 2.0**53
