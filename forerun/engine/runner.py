"""Runs the target over a plan, and keeps the caches true to what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forerun.attention import AttentionBackend
from forerun.engine.inputs import build_inputs
from forerun.engine.plan import ForwardResult, Hidden, Plan
from forerun.models.decoder import Attend, DecoderOutput
from forerun.spec.verifier import Verdict


class Model(Protocol):
    """What the runner needs of a target; `models.decoder.Decoder` is one, and so is the tests' scripted target."""

    @property
    def row_multiple(self) -> int: ...

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[tuple[int, bool]] = ()
    ) -> DecoderOutput: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Runner:
    """One target and its cache group.

    Args:
        model: the target.
        attention: the backend that owns the group's keys and values.
        block_size: tokens a block.
        taps: target states that the proposer wants to see.
    """

    def __init__(
        self, model: Model, attention: AttentionBackend, block_size: int, taps: Sequence[tuple[int, bool]] = ()
    ) -> None:
        self.model = model
        self.attention = attention
        self.block_size = block_size
        self.taps = taps

    @torch.inference_mode()
    def forward(self, plan: Plan) -> ForwardResult:
        """One pass over all rows of the plan; logits where `Plan.sampling` wants them."""
        inputs = build_inputs(
            plan,
            block_size=self.block_size,
            row_tile=self.attention.row_tile,
            row_multiple=self.model.row_multiple,
        )
        self.attention.begin(inputs.layout)
        output = self.model.forward(inputs.token_ids, inputs.positions, self.attention.attend, self.taps)
        logits = self.model.logits(output.hidden.index_select(0, inputs.logit_rows))  # plain indexing wakes threads
        return ForwardResult(logits, Hidden(output.taps) if self.taps else None)

    @torch.inference_mode()
    def keep(self, plan: Plan, verdict: Verdict) -> None:
        """Move the accepted path of each tree to the slots that a chain would have used."""
        sources: list[int] = []
        targets: list[int] = []
        for s in plan.scheduled:
            if s.draft.parents is None:
                continue
            known = s.start + s.num_tokens
            for place, node in enumerate(verdict.by_request[s.request.request_id].accepted):
                if node != place:
                    sources.append(self._slot(s.request.block_tables[0], known + node))
                    targets.append(self._slot(s.request.block_tables[0], known + place))
        if sources:
            self.attention.move(sources, targets)

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size
