"""Numbers of the host on their way to a device, without waiting for what it does."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[Sequence[int]] | array[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The values as a tensor on the device. From pinned memory: a copy from any other waits for the device."""
    if isinstance(values, array) and len(values):
        tensor = torch.frombuffer(values, dtype=torch.int32 if values.typecode == "i" else torch.int64).to(dtype)
    else:
        tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
