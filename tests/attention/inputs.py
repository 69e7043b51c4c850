"""What a backend is given, from heads that need nothing done to them."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.attention import AttentionInputs


def inputs_of(query: Tensor, key: Tensor, value: Tensor) -> AttentionInputs:
    """query [T, heads, D]; key, value [T, kv_heads, D]."""
    return AttentionInputs(torch.cat((query, key, value), 1).flatten(1), query.shape[1], key.shape[1])
