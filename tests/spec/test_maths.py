"""Acceptance and residual together give back the target's distribution, exactly, for any two distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.spec.maths import acceptance_probability, residual_distribution


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two distributions over one vocabulary [1, V]: zeros, disjoint supports, equal ones and tiny masses included."""
    size = draw(st.integers(1, 8))
    weight = st.one_of(st.just(0.0), st.floats(1e-9, 1.0), st.floats(0.1, 1.0))

    def distribution() -> torch.Tensor:
        weights = draw(st.lists(weight, min_size=size, max_size=size).filter(any))
        return torch.tensor([weights], dtype=torch.float64) / sum(weights)

    target = distribution()
    return target, target.clone() if draw(st.booleans()) and draw(st.booleans()) else distribution()


@settings(max_examples=500, deadline=None)
@given(pairs())
def test_the_law_of_the_emitted_token_is_the_targets(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Sum over every token that can be drafted, kept or replaced."""
    target, draft = pair
    drafted = draft[0].nonzero().flatten()
    rows = len(drafted)
    accepted = draft[0, drafted] * acceptance_probability(target.expand(rows, -1), draft.expand(rows, -1), drafted)
    residual = residual_distribution(target, draft)[0]
    law = (1 - accepted.sum()) * residual
    law[drafted] += accepted
    torch.testing.assert_close(law, target[0], atol=1e-15, rtol=1e-9)
    total_variation = 0.5 * (target - draft).abs().sum()
    torch.testing.assert_close(accepted.sum(), 1 - total_variation, atol=1e-12, rtol=0)


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_the_residual_is_a_distribution_that_leaves_out_what_can_be_rejected(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    target, draft = pair
    residual = residual_distribution(target, draft)
    assert float(residual.sum()) == pytest.approx(1.0)
    assert (residual >= 0).all()
    if not torch.equal(target, draft) and (target > draft).any():
        assert (residual[target <= draft] == 0).all()


def test_equal_distributions_leave_the_target() -> None:
    row = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert torch.equal(residual_distribution(row, row), row)
    assert acceptance_probability(row, row, torch.tensor([0, 0])).tolist() == [1.0, 1.0]


def test_rows_are_independent_of_one_another() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    draft = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.4, 0.2]])
    assert acceptance_probability(target, draft, torch.tensor([0, 1])).tolist() == pytest.approx([0.5, 0.75])
    torch.testing.assert_close(residual_distribution(target, draft), torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))


def test_other_shapes_are_refused() -> None:
    row, other = torch.ones(1, 3) / 3, torch.ones(1, 4) / 4
    with pytest.raises(ValueError, match=r"\[1, 3\].*\[1, 4\]"):
        residual_distribution(row, other)
    with pytest.raises(ValueError, match=r"\[1, 3\].*\[1, 4\]"):
        acceptance_probability(row, other, torch.tensor([0]))
