"""Rows to draw from and chains to judge, of all kinds: for the plain functions of `sampling.slots` and the kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.request import SamplingParams
from forerun.sampling.slots import pack_params

NUM_PROMPT_TOKENS = 7
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.9),
    SamplingParams(),
    SamplingParams(temperature=0.01),
    SamplingParams(temperature=2.0),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=1.3, top_k=20),
    SamplingParams(top_k=10_000_000_000),
    SamplingParams(temperature=0.6, top_p=0.95),
    SamplingParams(top_p=1e-30),
    SamplingParams(top_p=0.9999),
    SamplingParams(temperature=1.7, min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.2, top_k=9, min_p=0.01),
    SamplingParams(temperature=1.4, top_k=40, top_p=0.8),
    SamplingParams(temperature=1.9, top_k=-1, top_p=0.9, min_p=0.001),
    SamplingParams(temperature=1.1, top_k=30, top_p=0.97, min_p=0.02),
)
SEEDS = (0, 1, -1, -(2**63), 2**64 - 1, 2**63 + 12345, 0xDEADBEEF << 20)


@dataclass
class Slots:
    """What is on the host of each slot, and the same as a table."""

    params: list[SamplingParams]
    seeds: list[int]
    choices: list[int]

    def table(self, device: torch.device) -> Tensor:
        rows = zip(self.params, self.seeds, self.choices, strict=True)
        return torch.tensor([pack_params(*row, NUM_PROMPT_TOKENS) for row in rows], dtype=torch.int32, device=device)


def make_slots(seed: int) -> Slots:
    """One for each of PARAMS, in another order."""
    rng = random.Random(seed)
    params = rng.sample(PARAMS, len(PARAMS))
    return Slots(params, [rng.choice(SEEDS) for _ in params], [rng.choice((0, 1, 77)) for _ in params])


def make_logits(seed: int, rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, vocab] inside of wider rows: spread as a model's are; some flat, wide, far from 0, with ties, masked."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, vocab + 5, generator=generator) * 2.5
    for row in range(rows):
        kind = (row + seed) % 7
        if kind == 1:
            wide[row] *= 0.01
        elif kind == 2:
            wide[row] *= 20
        elif kind == 3:
            wide[row] -= 3000
        elif kind == 4:
            wide[row] = wide[row].round()
        elif kind == 5:
            wide[row][torch.rand(vocab + 5, generator=generator) < 0.9] = -torch.inf
            wide[row, row % vocab] = 1.0
        elif kind == 6:
            wide[row][torch.rand(vocab + 5, generator=generator) < 0.5] = torch.finfo(dtype).min
            wide[row, row % vocab] = 1.0
    return wide.to(dtype)[:, :vocab]


def broken_logits(vocab: int) -> Tensor:
    """[5, vocab] float32, no row of which can be drawn from."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(3))
    logits[0, vocab // 2] = torch.nan
    logits[1, vocab - 1] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, 0], logits[4, vocab - 1] = torch.inf, torch.nan
    return logits


@dataclass
class Chains:
    """A step of chains: the arguments of `slots.judge` but for params and rates."""

    drawn: Tensor
    drafted: Tensor
    num_rows: Tensor
    slots: Tensor
    positions: Tensor
    last: Tensor

    def to(self, device: torch.device) -> Chains:
        return Chains(**{name: tensor.clone().to(device) for name, tensor in vars(self).items()})


def make_chains(seed: int, requests: int, width: int, num_slots: int) -> Chains:
    """Drafts that are right up to a random place, padding (whose entries hold anything), rows that cannot be drawn
    from, requests without a draft and places without a request."""
    rng = random.Random(seed)
    drawn = torch.tensor([[rng.randrange(50) for _ in range(width)] for _ in range(requests)])
    drafted = torch.tensor([[rng.randrange(50) for _ in range(width - 1)] for _ in range(requests)]).view(requests, -1)
    num_rows = torch.tensor([rng.randrange(width + 1) for _ in range(requests)])
    for i in range(requests):
        right = rng.randrange(width)
        drafted[i, :right] = drawn[i, :right]
        if rng.random() < 0.3:
            drawn[i, rng.randrange(width)] = -1
    slots = torch.tensor(rng.sample(range(num_slots), requests))
    slots[num_rows == 0] = 10**9  # not looked at
    positions = torch.tensor([rng.randrange(NUM_PROMPT_TOKENS - 1, 90) for _ in range(num_slots)], dtype=torch.int32)
    last = torch.tensor([[rng.randrange(50), rng.randrange(50)] for _ in range(num_slots)], dtype=torch.int32)
    return Chains(drawn, drafted, num_rows, slots, positions, last)
