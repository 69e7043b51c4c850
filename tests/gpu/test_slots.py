"""The kernels that draw and judge against their plain twins.

On a CPU, by Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_slots.py`, with smaller vocabularies.
"""

from __future__ import annotations

import os

import pytest
import torch

from forerun.request import SamplingParams
from forerun.sampling import slots as plain
from tests.sampling.slot_cases import PARAMS, broken_logits, make_chains, make_logits, make_slots

pytest.importorskip("triton")
from forerun.kernels import triton_sampling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
VOCABULARIES = [1, 3, 300, 5000] if INTERPRETED else [1, 3, 300, 5000, 32_000, 151_936, 256_000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


@pytest.fixture
def device() -> torch.device:
    if torch.cuda.is_available() and not INTERPRETED:
        return torch.device("cuda")
    if not INTERPRETED:
        pytest.skip("no usable GPU")
    return torch.device("cpu")


def check(logits: torch.Tensor, seed: int, device: torch.device) -> None:
    """Every kind of parameters, in one launch; most rows give something else than the most likely token."""
    rows = logits.shape[0]
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(len(PARAMS), generator=generator).repeat(-(-rows // len(PARAMS)))[:rows].to(device)
    positions = torch.randint(100_000, (rows,), generator=generator).to(device)
    table = make_slots(seed).table(device)
    logits = logits.to(device)
    drawn = triton_sampling.draw_rows(logits, slots, positions, table)
    assert drawn.tolist() == plain.plain_draw_rows(logits, slots, positions, table).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draws_are_the_twins(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(2 if vocab < 1000 or not INTERPRETED else 1):
        check(make_logits(seed, 34, vocab, dtype), seed, device)


@pytest.mark.parametrize("vocab", VOCABULARIES[2:])
def test_floors_are_the_twins(vocab: int, device: torch.device) -> None:
    """Of entries that may be drawn the same are kept, but at the edge of top_p: masses are summed in float32 there, so
    that in a large vocabulary one entry of a flat row may be on the other side."""
    edge = 2e-5 + (2 / vocab if vocab > 1000 else 0)
    for seed in range(4):
        table = make_slots(seed).table(device)
        slots = torch.arange(34, device=device) % len(table)
        logits = make_logits(seed, 34, vocab).to(device)
        records = table[slots]
        temperature, top_p, _ = plain._reals(records)
        values = logits / torch.where(temperature == 0, 1.0, temperature)
        floors = triton_sampling._launch_floors(logits, slots, table)
        kept, expected = values >= floors, values >= plain._floors(values, records)
        other = (kept != expected) & (values > values.amax(1, keepdim=True) - 26.1) & (temperature > 0)
        assert not (other & (top_p == 1)).any()
        assert (values.double().softmax(1) * other).sum(1).max() < edge


@pytest.mark.parametrize("vocab", [2, 4500])
def test_rows_that_cannot_be_drawn_from(vocab: int, device: torch.device) -> None:
    logits = broken_logits(vocab).to(device)
    for slot in range(len(PARAMS)):
        slots, positions = torch.full((5,), slot, device=device), torch.arange(5, device=device)
        drawn = triton_sampling.draw_rows(logits, slots, positions, make_slots(0).table(device))
        assert drawn.tolist() == [-1] * 5


def test_the_first_of_equal_logits_is_greedys_in_any_part(device: torch.device) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, 3000:] = logits[1, 1000] = logits[1, 4000] = 1.0
    table = torch.zeros(1, plain.PARAM_FIELDS, dtype=torch.int32, device=device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    assert triton_sampling.draw_rows(logits.to(device), slots, slots, table).tolist() == [3000, 1000, 0]


def test_no_rows(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    table = torch.zeros(1, plain.PARAM_FIELDS, dtype=torch.int32, device=device)
    assert triton_sampling.draw_rows(torch.empty(0, 30, device=device), none, none, table).shape == (0,)


@pytest.mark.parametrize("near", [triton_sampling.NEAR, 0.9])
@pytest.mark.parametrize("far", [0.0, -30.0, -3e6])
def test_float64_decides_among_near_scores(
    far: float, near: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal logits leave all to the noise, far from 0 too; as many as ten tokens are looked at where `near` is far."""
    monkeypatch.setattr(triton_sampling, "NEAR", near)
    rows, vocab = 6, 300
    logits = torch.full((rows, vocab), far, device=device)
    slots, positions = torch.arange(rows, device=device), torch.arange(rows, device=device) * 977
    known = make_slots(1)
    known.params = [SamplingParams(temperature=temperature) for temperature in (0.0, 0.3, 0.7, 1.0, 1.5, 2.0)]
    known.seeds, known.choices = known.seeds[:rows], known.choices[:rows]
    drawn = triton_sampling.draw_rows(logits, slots, positions, known.table(device))
    assert drawn.tolist() == plain.plain_draw_rows(logits, slots, positions, known.table(device)).tolist()
    assert len(set(drawn.tolist())) > 3


@pytest.mark.parametrize("chance", [False, True])
@pytest.mark.parametrize("width", [1, 2, 6, 9])
def test_verdicts_are_the_twins(width: int, chance: bool, device: torch.device) -> None:
    rates = torch.linspace(0.9, 0.3, 8, dtype=torch.float64, device=device) if chance else None
    for seed in range(10):
        table = make_slots(seed).table(device)
        ours = make_chains(seed, 12, width, len(table)).to(device)
        twins = ours.to(device)
        verdict = triton_sampling.judge(**vars(ours), params=table, rates=rates)
        expected = plain.plain_judge(**vars(twins), params=table, rates=rates)
        assert verdict.tolist() == expected.tolist()
        assert torch.equal(ours.positions, twins.positions)
        assert torch.equal(ours.last, twins.last)


def test_a_graph_holds_a_draw_and_a_verdict(device: torch.device) -> None:
    """Replayed with other contents of the same tensors."""
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    rows, vocab, width = 20, 5000, 5
    table = make_slots(0).table(device)
    logits = torch.empty(rows, vocab, device=device)
    slots, positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
    chains = make_chains(0, 4, width, len(table)).to(device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        drawn = plain.draw_rows(logits, slots, positions, table)
        rest = {name: value for name, value in vars(chains).items() if name != "drawn"}
        return drawn, plain.judge(drawn.view(4, width), **rest, params=table)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, verdict = step()
    for seed in range(1, 5):
        logits.copy_(make_logits(seed, rows, vocab))
        slots.copy_(torch.arange(rows) % len(table))
        positions.fill_(seed)
        new = make_chains(seed, 4, width, len(table)).to(device)
        expected_drawn = plain.plain_draw_rows(logits, slots, positions, table)
        new.drawn = expected_drawn.view(4, width)
        new.drafted[:, :2] = new.drawn[:, :2]
        for name, value in vars(chains).items():
            value.copy_(getattr(new, name))
        graph.replay()
        assert drawn.tolist() == expected_drawn.tolist()
        assert verdict.tolist() == plain.plain_judge(**vars(new), params=table).tolist()
        assert torch.equal(chains.positions, new.positions)
