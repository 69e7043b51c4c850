"""Draws and verdicts of the device, in plain torch, against those of the host: row by row, request by request."""

from __future__ import annotations

import dataclasses
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.request import FinishReason, SamplingParams
from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import draw, most_likely, processed_logprobs
from forerun.sampling.slots import PARAM_FIELDS, draw_rows, judge, pack_params
from forerun.spec.proposer import RequestDraft
from forerun.spec.verifiers.match import BestTokens, MatchVerifier
from forerun.spec.verifiers.synthetic import SyntheticVerifier
from tests.sampling.slot_cases import (
    NUM_PROMPT_TOKENS,
    PARAMS,
    SEEDS,
    Slots,
    broken_logits,
    make_chains,
    make_logits,
    make_slots,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # of the least float, which masks, by a small temperature


def on_the_host(logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, known: Slots) -> list[int]:
    rows = logits.float()
    best, finite = most_likely(rows)
    tokens = []
    for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        params = known.params[slot]
        token = best[i]
        if finite[i] and not params.greedy:
            token = draw(processed_logprobs(rows[i], params), known.seeds[slot], known.choices[slot], position)
        tokens.append(token if finite[i] else -1)
    return tokens


def check(logits: torch.Tensor, known: Slots, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = logits.shape[0]
    slots = torch.randint(len(known.params), (rows,), generator=generator)
    slots[: len(known.params)] = torch.randperm(len(known.params), generator=generator)[:rows]
    positions = torch.randint(100_000, (rows,), generator=generator)
    drawn = draw_rows(logits, slots, positions, known.table(CPU))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == on_the_host(logits, slots, positions, known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 1001])
def test_draws_are_the_hosts(vocab: int, dtype: torch.dtype) -> None:
    for seed in range(8):
        check(make_logits(seed, 40, vocab, dtype), make_slots(seed), seed)


def test_draws_are_the_hosts_in_a_large_vocabulary() -> None:
    check(make_logits(1, 20, 50_001), make_slots(1), 1)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=30),
    st.floats(0.01, 2),
    st.integers(-1, 35),
    st.floats(1e-6, 1),
    st.sampled_from((0.0, 0.01, 0.3, 1.0)),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 2**20),
)
def test_any_parameters_any_seed(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> None:
    """Ties are common among these logits."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor([values])
    before = processed_logprobs(logits[0], dataclasses.replace(params, top_p=1.0))
    if (before.double().exp().sort(descending=True).values.cumsum(0) - top_p).abs().min() < 1e-5:
        params = dataclasses.replace(params, top_p=1.0)  # at an edge its float32 decides
    known = Slots([params], [seed], [3])
    slots, positions = torch.zeros(1, dtype=torch.int64), torch.tensor([position])
    drawn = draw_rows(logits, slots, positions, known.table(CPU)).tolist()
    assert drawn == on_the_host(logits, slots, positions, known)


@pytest.mark.parametrize("vocab", [2, 300])
def test_rows_that_cannot_be_drawn_from(vocab: int) -> None:
    logits = broken_logits(vocab)
    for slot in range(len(PARAMS)):
        drawn = draw_rows(logits, torch.full((5,), slot), torch.arange(5), make_slots(0).table(CPU))
        assert drawn.tolist() == [-1] * 5


def test_the_first_of_equal_logits_is_greedys() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [-1.0, -1.0, -1.0, -1.0]])
    table = Slots([SamplingParams(temperature=0)], [0], [0]).table(CPU)
    assert draw_rows(logits, torch.zeros(2, dtype=torch.int64), torch.arange(2), table).tolist() == [1, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_holds_what_it_was_given(seed: int) -> None:
    params = SamplingParams(temperature=0.6, top_p=0.95, min_p=0.05, top_k=-1)
    record = pack_params(params, seed, 5, 1000)
    assert len(record) == PARAM_FIELDS
    assert all(-(2**31) <= word < 2**31 for word in record)
    packed = struct.pack("=8i", *record)
    assert struct.unpack("=3f", packed[:12]) == pytest.approx((0.6, 0.95, 0.05))
    assert struct.unpack("=iQ2i", packed[12:]) == (0, seed % 2**64, 5, 1000)


@pytest.mark.parametrize("chance", [False, True])
@pytest.mark.parametrize("width", [1, 2, 6])
def test_verdicts_are_the_hosts(width: int, chance: bool) -> None:
    rates = [0.9, 0.8, 0.5, 0.4, 0.1]
    verifier = SyntheticVerifier(rates) if chance else MatchVerifier()
    for seed in range(30):
        known = make_slots(seed)
        known.params = [SamplingParams(temperature=0)] * len(known.params)
        chains = make_chains(seed, 12, width, len(known.params))
        before = chains.to(CPU)
        conditional = torch.tensor(SyntheticVerifier(rates).conditional, dtype=torch.float64) if chance else None
        verdicts = judge(**vars(chains), params=known.table(CPU), rates=conditional)
        assert verdicts.shape == (12, 2 + width)
        touched = set()
        for i, (accepted, emitted, *tokens) in enumerate(verdicts.tolist()):
            rows, slot = int(chains.num_rows[i]), int(chains.slots[i])
            assert tokens[emitted:] == [-1] * (width - emitted)
            if rows == 0:
                assert (accepted, emitted) == (0, 0)
                continue
            touched.add(slot)
            output = int(before.positions[slot]) + 1 - NUM_PROMPT_TOKENS
            draft = RequestDraft(chains.drafted[i, : rows - 1].tolist())
            drawn = chains.drawn[i].tolist()
            place = SamplingRows("r", known.params[slot], known.seeds[slot], known.choices[slot], 0, rows, output)
            best = BestTokens(drawn, [token >= 0 for token in drawn])
            expected = verifier.judge(draft, torch.empty(width, 0), place, best)
            assert (accepted, tokens[:emitted]) == (len(expected.accepted), expected.token_ids)
            assert (emitted == accepted) == (expected.finish_reason is FinishReason.ERROR)
            assert int(chains.positions[slot]) == int(before.positions[slot]) + emitted
            assert chains.last[slot].tolist() == [*before.last[slot].tolist(), *tokens[:emitted]][-2:]
        for slot in set(range(len(known.params))) - touched:
            assert chains.positions[slot] == before.positions[slot]
            assert torch.equal(chains.last[slot], before.last[slot])
