"""The maths of verification as pure functions: no state and no drawing."""

from __future__ import annotations

import torch
from torch import Tensor


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor, token_ids: Tensor) -> Tensor:
    """The chance at which a drafted token is to be kept.

    Args:
        target_probs, draft_probs: [B, V] floating, each row sums to 1.
        token_ids: [B] int64, the token drawn from each row of `draft_probs`, which must be above 0 there.
    Returns:
        [B], same dtype: min(1, target / draft) at the token.
    Raises:
        ValueError: the shapes differ.
    Source: Leviathan et al. 2023, arXiv 2211.17192, section 2.3.
    """
    _check_shapes(target_probs, draft_probs)
    target, draft = (probs.gather(1, token_ids.unsqueeze(1)).squeeze(1) for probs in (target_probs, draft_probs))
    return (target / draft).clamp(max=1.0)


def residual_distribution(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The distribution to draw from after the first rejected draft token.

    Args:
        target_probs, draft_probs: [B, V] floating, each row sums to 1.
    Returns:
        [B, V], same dtype: max(target - draft, 0) rescaled; the target row where nothing is left of it, as when the
        two are equal.
    Raises:
        ValueError: the shapes differ.
    Source: Leviathan et al. 2023, arXiv 2211.17192, section 2.3.
    """
    _check_shapes(target_probs, draft_probs)
    residual = (target_probs - draft_probs).clamp(min=0.0)
    mass = residual.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, residual / mass, target_probs)


def block_acceptance(target_probs: Tensor, draft_probs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """How block verification judges a chain of drafted tokens as a whole.

    With an independent uniform number for each token, the accepted length is the largest i whose number is below
    thresholds[i - 1], or 0; after i < K tokens the next one is drawn from
    `residual_distribution(ratios[i] * target_probs[i], draft_probs[i])`, after K from the target.

    Args:
        target_probs, draft_probs: [K, V] floating, each row sums to 1: row i follows the first i drafted tokens.
        token_ids: [K] int64, the token drawn from each row of `draft_probs`, which must be above 0 there.
    Returns:
        ratios: [K + 1], same dtype: the running ratio target / draft of the first i tokens, cut to 1 at each; 1 for
            none. Given the first i drafted tokens it is the chance that at least i stand.
        thresholds: [K], same dtype, in [0, 1].
    Raises:
        ValueError: the shapes differ.
    Source: Sun et al. 2024, arXiv 2403.10444.
    """
    _check_shapes(target_probs, draft_probs)
    target, draft = (probs.gather(1, token_ids.unsqueeze(1)).squeeze(1) for probs in (target_probs, draft_probs))
    ratios = [1.0]
    for ratio in (target / draft).tolist():
        ratios.append(min(ratios[-1] * ratio, 1.0))
    running = target_probs.new_tensor(ratios)
    left = (running[1:-1, None] * target_probs[1:] - draft_probs[1:]).clamp(min=0.0).sum(dim=-1)
    total = left + 1 - running[1:-1]
    inner = torch.where(total > 0, left / total, 1.0)
    return running, torch.cat([inner, running[-1:]])


def top_entropy(probs: Tensor, top_k: int) -> float:
    """How unsure a distribution is, in nats: -sum of p ln p over its most likely tokens, which are not renormalised.

    Args:
        probs: [V] floating, sums to 1.
        top_k: tokens that are summed over; V where there are no more.
    """
    return float(torch.special.entr(probs.topk(min(top_k, probs.shape[0])).values.double()).sum())


def _check_shapes(target_probs: Tensor, draft_probs: Tensor) -> None:
    if target_probs.shape != draft_probs.shape:
        raise ValueError(
            f"target_probs {list(target_probs.shape)} and draft_probs {list(draft_probs.shape)} must have one shape"
        )
