"""A head's reduced vocabulary: which target id each draft id stands for.

Checkpoints store offsets: draft id j is target id j + d2t[j]; GGUF files store the target ids. A table read the wrong
way drafts other tokens than the head means, and nothing but the acceptance would tell: every sign of that is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import CheckpointError


def from_offsets(d2t: Tensor, num_draft: int, num_target: int, t2d: Tensor | None = None) -> Tensor | None:
    """The target id of each draft id, [num_draft] int64, or None if both vocabularies are the same.

    Args:
        d2t: [num_draft] integers, offsets.
        t2d: [num_target], whether a target id has a draft id; what checkpoints carry for training, here a check.
    Raises:
        CheckpointError: other shapes or kinds, ids outside of the target's vocabulary, ids that do not ascend, a table
            that reads as absolute ids, or one that t2d contradicts.
    """
    _check_integers("d2t", d2t, num_draft)
    offsets = d2t.to(torch.int64)
    ids = offsets + torch.arange(num_draft)
    absolute = num_draft > 1 and _ascending_within(offsets, num_target)  # offsets stand still between neighbours
    if t2d is not None:
        marked = _marked(t2d, num_target)
        if torch.equal(marked, ids):
            return _unless_identity(ids, num_target)
        if torch.equal(marked, offsets):
            raise CheckpointError("tensor 'd2t' holds absolute target ids (t2d marks the same); offsets are expected")
        raise CheckpointError(f"tensors 'd2t' and 't2d' disagree: {num_draft} draft ids, {len(marked)} marked in t2d")
    if absolute:
        raise CheckpointError(
            "tensor 'd2t' reads as absolute target ids: every value is above the one before; offsets are expected"
        )
    if not _ascending_within(ids, num_target):
        raise CheckpointError(
            f"tensor 'd2t' must hold offsets: j + d2t[j] ascending within 0..{num_target - 1}, "
            f"found {int(ids.min())} to {int(ids.max())}"
        )
    return _unless_identity(ids, num_target)


def from_ids(ids: Tensor, num_draft: int, num_target: int) -> Tensor | None:
    """The same where target ids are stored, as in GGUF files.

    Raises:
        CheckpointError: other shapes or kinds, ids outside of the target's vocabulary, or ids that do not ascend.
    """
    _check_integers("d2t", ids, num_draft)
    ids = ids.to(torch.int64)
    if not _ascending_within(ids, num_target):
        raise CheckpointError(
            f"tensor 'd2t' must hold ascending target ids within 0..{num_target - 1}, "
            f"found {int(ids.min())} to {int(ids.max())}"
        )
    return _unless_identity(ids, num_target)


def _check_integers(name: str, tensor: Tensor, size: int) -> None:
    if tuple(tensor.shape) != (size,):
        raise CheckpointError(f"tensor {name!r}: expected shape {[size]}, found {list(tensor.shape)}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise CheckpointError(f"tensor {name!r} must hold integers, found {tensor.dtype}")


def _marked(t2d: Tensor, num_target: int) -> Tensor:
    if tuple(t2d.shape) != (num_target,):
        raise CheckpointError(f"tensor 't2d': expected shape {[num_target]}, found {list(t2d.shape)}")
    return t2d.nonzero().flatten()


def _ascending_within(ids: Tensor, limit: int) -> bool:
    return bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < limit


def _unless_identity(ids: Tensor, num_target: int) -> Tensor | None:
    return None if len(ids) == num_target else ids
