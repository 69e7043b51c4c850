"""The generator is the published one, and its noise depends on the key alone."""

from __future__ import annotations

import pytest
import torch

from forerun.sampling.noise import LEAST_NOISE, MASK, MOST_NOISE, Stream, gumbel, philox, uniform

# Known answers of Philox4x32-10 from the Random123 distribution (kat_vectors): counter, key, output
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK, MASK, MASK, MASK), (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    first, *rest = counter
    words = philox((torch.tensor([first]), rest[0], rest[1], rest[2]), key)
    assert tuple(int(word) for word in words) == expected


def ids(count: int) -> torch.Tensor:
    return torch.arange(count)


def test_each_part_of_the_key_matters() -> None:
    base = gumbel(1, 0, 0, ids(50))
    assert torch.equal(base, gumbel(1, 0, 0, ids(50)))
    for other in [(2, 0, 0), (1 + 2**32, 0, 0), (1, 1, 0), (1, 0, 1)]:
        assert not torch.isclose(base, gumbel(*other, ids(50))).any()
    assert not torch.isclose(base, gumbel(1, 0, 0, ids(50), place=1)).any()


def test_a_token_has_the_same_noise_among_any_others() -> None:
    every = gumbel(3, 0, 9, ids(1000))
    assert len(set(every.tolist())) == 1000
    for chosen in [
        ids(77),
        torch.tensor([5]),
        torch.tensor([999, 3, 500, 7]),
        torch.arange(1, 1000, 13),
        torch.arange(0, 1000, 3),
    ]:
        assert torch.equal(gumbel(3, 0, 9, chosen), every[chosen])


def test_negative_seeds_are_seeds_of_their_own() -> None:
    assert torch.isfinite(gumbel(-1, 0, 0, ids(9))).all()
    assert torch.equal(gumbel(-1, 0, 0, ids(9)), gumbel(2**64 - 1, 0, 0, ids(9)))


def test_noise_has_the_bounds_that_are_stated() -> None:
    """The extremes of 32 bits, through the same formula."""
    for word, bound in [(0, LEAST_NOISE), (MASK, MOST_NOISE)]:
        uniform = (torch.tensor([word]).double() + 0.5) / 2.0**32
        assert float(-torch.log(-torch.log(uniform))) == pytest.approx(bound, abs=1e-6)


def test_noise_is_gumbel_distributed() -> None:
    """200,000 draws against the Gumbel law: Kolmogorov-Smirnov at a false-alarm rate of 1e-6 (2.7 / sqrt(n))."""
    noise = torch.cat([gumbel(seed, 0, 5, ids(1000)) for seed in range(200)]).sort().values
    n = noise.shape[0]
    law = torch.exp(-torch.exp(-noise))
    empirical = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert float((law - empirical).abs().max()) < 2.7 / n**0.5


def test_the_targets_stream_keeps_its_bits() -> None:
    """Seeds that users keep must give tomorrow's text too: these numbers may never change."""
    noise = gumbel(42, 1, 7, torch.tensor([0, 5, 49_151]))
    assert noise.tolist() == pytest.approx([-0.31139026854496615, 0.8058147924717961, -1.3105440465844729], rel=1e-14)


def test_streams_are_independent_of_one_another() -> None:
    """Correlations of 20,000 numbers: 4.9 standard errors are passed by chance once in a million."""
    streams = torch.stack([torch.cat([gumbel(seed, 0, 5, ids(1000), s) for seed in range(20)]) for s in Stream])
    assert torch.equal(streams[Stream.TARGET][:1000], gumbel(0, 0, 5, ids(1000)))
    n = streams.shape[1]
    assert (torch.corrcoef(streams) - torch.eye(len(Stream))).abs().max() < 4.9 / n**0.5
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.isclose(streams[a], streams[b], atol=1e-12).any()


def test_uniforms_are_uniform_and_depend_on_all_of_their_key() -> None:
    """Kolmogorov-Smirnov at a false-alarm rate of 1e-6, over seeds and over positions."""
    for numbers in (
        [uniform(seed, 0, 3, Stream.ACCEPT) for seed in range(5000)],
        [uniform(1, 0, position, Stream.ACCEPT) for position in range(5000)],
    ):
        assert all(0.0 <= u < 1.0 for u in numbers)
        empirical = torch.arange(1, 5001, dtype=torch.float64) / 5000
        law = torch.tensor(sorted(numbers), dtype=torch.float64)
        assert float((law - empirical).abs().max()) < 2.7 / 5000**0.5
    keys = [(1, 0, 0), (2, 0, 0), (1 + 2**32, 0, 0), (1, 1, 0), (1, 0, 1)]
    assert len({uniform(*key, Stream.ACCEPT) for key in keys} | {uniform(1, 0, 0, Stream.DRAFT)}) == len(keys) + 1
    assert len({uniform(1, 0, 0, Stream.ACCEPT, place) for place in range(9)}) == 9


def test_plain_numbers_go_through_the_same_generator() -> None:
    words = philox((torch.tensor([0]), 9, 2, int(Stream.ACCEPT)), (7, 1))
    first, second = int(words[0]), int(words[1])
    assert uniform(7 + 2**32, 2, 9, Stream.ACCEPT) == (first * 2**21 + second // 2**11) / 2**53
