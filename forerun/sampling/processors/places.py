"""Single places of the logits, collected over requests and changed at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

    def on(self, logits: Tensor) -> Selection:
        """The collected places of these logits [R, V]; also where there are none."""
        rows, ids = (np.concatenate(parts) if parts else np.zeros(0, np.int64) for parts in (self._rows, self._ids))
        return Selection(logits, rows, ids)

    def forbid(self, logits: Tensor) -> None:
        if self._rows:
            self.on(logits).put(NEGATIVE_INFINITY)


class Selection:
    """Places of one step's logits. On a CPU numpy reads, changes and writes them: torch would wake its threads for it,
    which costs a step of a small model up to a seventh of its time."""

    def __init__(self, logits: Tensor, rows: Ids, ids: Ids) -> None:
        self._logits = logits
        self._places = rows, ids

    def get(self) -> Tensor:
        """[N] float32, a copy."""
        if self._logits.is_cpu:
            return torch.from_numpy(self._logits.numpy()[self._places])
        return self._logits[self._index()]

    def change(self, function: Callable[..., Any], *amounts: Amounts) -> None:
        """Replace all values by `function(module, values, *amounts)`.

        Args:
            function: of arrays [N], written for numpy and torch alike: `module` is the one that the arrays belong to.
            amounts: [N] each.
        """
        if self._logits.is_cpu:
            logits = self._logits.numpy()
            logits[self._places] = function(np, logits[self._places], *amounts)
        else:
            others = (torch.from_numpy(part).to(self._logits.device) for part in amounts)
            self.put(function(torch, self.get(), *others))

    def put(self, values: Tensor | float) -> None:
        """Write [N] values, or one for all."""
        if self._logits.is_cpu:
            self._logits.numpy()[self._places] = values.numpy() if isinstance(values, Tensor) else values
        else:
            self._logits[self._index()] = values

    def _index(self) -> tuple[Tensor, Tensor]:
        rows, ids = (torch.from_numpy(part).to(self._logits.device) for part in self._places)
        return rows, ids
