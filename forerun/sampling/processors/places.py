"""Single places of the logits, collected over requests and changed at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")
Ids = npt.NDArray[np.int64]
Amounts = npt.NDArray[np.float32]


class Places:
    """(row, token id) pairs. A kind of change costs one gather and one scatter, however many requests ask for it."""

    def __init__(self) -> None:
        self._rows: list[Ids] = []
        self._ids: list[Ids] = []

    def add(self, rows: Sequence[int], ids: Ids) -> None:
        """Every id in every row: row by row."""
        self.add_pairs(np.repeat(np.asarray(rows, np.int64), len(ids)), np.tile(ids, len(rows)))

    def add_pairs(self, rows: Ids, ids: Ids) -> None:
        self._rows.append(rows)
        self._ids.append(ids)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and ids for indexing the logits; also where there are none."""
        rows, ids = (np.concatenate(parts) if parts else np.zeros(0, np.int64) for parts in (self._rows, self._ids))
        return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)

    def forbid(self, logits: Tensor) -> None:
        if self._rows:
            logits[self.index(logits.device)] = NEGATIVE_INFINITY
