"""Temperature, top-k and top-p against their definitions, and draws against the law."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.request import SamplingParams
from forerun.sampling.distribution import draw, most_likely, processed_logprobs
from forerun.sampling.noise import gumbel

logits_of = st.lists(st.integers(-200, 200).map(lambda n: n / 10), min_size=2, max_size=40, unique=True)


@settings(max_examples=200, deadline=None)
@given(logits_of, st.floats(0.1, 5), st.integers(0, 45), st.floats(0.01, 1))
def test_equals_the_definition(values: list[float], temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    got = processed_logprobs(torch.tensor(values), params).exp().double()
    probs = torch.softmax(torch.tensor(values, dtype=torch.float64) / temperature, 0)
    order = sorted(range(len(values)), key=lambda i: -values[i])
    kept = order[:top_k] if 0 < top_k < len(values) else order
    mass, chosen = float(probs[kept].sum()), []
    total = 0.0
    for i in kept:
        chosen.append(i)
        total += float(probs[i]) / mass
        if total >= top_p:
            break
    if abs(total - top_p) < 1e-5 or (len(chosen) > 1 and abs(total - float(probs[chosen[-1]]) / mass - top_p) < 1e-5):
        return  # float32 sums may end one token earlier or later at the edge
    expected = torch.zeros_like(probs)
    expected[chosen] = probs[chosen] / probs[chosen].sum()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-3)


def test_top_p_past_the_first_candidates_is_the_same_rule() -> None:
    """A flat distribution needs more than the head that is sorted first."""
    logits = torch.linspace(0, -0.5, 5000)
    kept = int((processed_logprobs(logits, SamplingParams(top_p=0.9)) > -math.inf).sum())
    probs = torch.softmax(logits.double(), 0)
    assert kept == pytest.approx(int((probs.cumsum(0) < 0.9).sum()) + 1, abs=1)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(top_k=5), SamplingParams(top_p=0.7)]
)
def test_draws_follow_the_processed_distribution(params: SamplingParams) -> None:
    """Chi-square over 16 tokens, 10,000 draws, p < 1e-6 (45.1 + margin at 15 degrees of freedom is 55.5).

    Any total-variation error of 0.05 has a noncentrality of at least 4 * 10000 * 0.05^2 = 100: power above 0.999.
    """
    logits = torch.linspace(1.0, -1.0, 16)
    logprobs = processed_logprobs(logits, params)
    counts = torch.zeros(16)
    for position in range(10_000):
        counts[draw(logprobs, 7, 0, position)] += 1
    expected = logprobs.exp() * 10_000
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert expected[possible].min() >= 20
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert statistic < 55.5


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**63), st.floats(0.1, 60), st.booleans())
def test_leaving_out_the_hopeless_changes_no_draw(seed: int, width: float, filtered: bool) -> None:
    """The winner among all tokens, noise made for every one of them."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(seed % 997)) * width
    logprobs = processed_logprobs(logits, SamplingParams(top_p=0.9 if filtered else 1.0))
    everything = logprobs.double() + gumbel(seed, 0, 4, torch.arange(3000))
    assert draw(logprobs, seed, 0, 4) == int(everything.argmax())


def test_the_most_likely_token_is_the_first_of_the_largest() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    logits[1, 300] = logits[1, 700] = 50.0
    logits[2, 400], logits[2, 800], logits[2, 900] = torch.inf, torch.nan, torch.nan
    logits[3] = -torch.inf
    ids, finite = most_likely(logits)
    assert ids[1:4] == [300, 800, 0]
    assert finite == [True, True, False, False, True]
    assert [ids[0], ids[4]] == logits[[0, 4]].argmax(-1).tolist()
