"""How many tokens to draft. No torch here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Protocol

from forerun.request import Request
from forerun.spec.batch_table import Table
from forerun.spec.config import SpeculativeConfig

# Steps for which more tokens must be allowed before they are: requests that come and go around an edge of a table
# would have K, and with it the time of a step, flap.
STEPS_TO_RISE: Final = 8


class Control(Protocol):
    """Chooses how far each running request may draft in the next step."""

    def lengths(self, requests: Sequence[Request]) -> dict[str, int]:
        """Most tokens to draft, by request id; a request that is absent, or has 0, must not draft.

        Called once a step.

        Args:
            requests: all that run. Those whose prompt is still being computed (not `Request.decoding`) draft nothing
                in this step, but a length above 0 says that their drafts will be wanted: a proposer with a cache
                fills it along.
        """
        ...


class FixedLength:
    """The same length for everybody: K, or less where a request asks for less."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def lengths(self, requests: Sequence[Request]) -> dict[str, int]:
        return lengths_of(requests, self.num_speculative_tokens)


class LengthByBatchSize:
    """K by the number of decoding requests: `num_speculative_tokens_per_batch_size`.

    Requests whose prompt is still being computed are not counted: they draft nothing, so their coming and going says
    nothing of what a draft costs. A smaller K holds at once, as too long drafts slow everybody down. A larger one holds
    once the table has allowed more in each of the last `STEPS_TO_RISE` steps, this one included: then the least that
    it allowed in them.

    Args:
        table: ranges (start, end, K) from 1 on, without gaps; beyond the last its K holds.
    """

    def __init__(self, table: Table) -> None:
        assert table
        assert table[0][0] == 1
        self.table = table
        self._starts = [start for start, _, _ in table]
        self._length = table[0][2]
        self._rise = table[0][2]  # the least that was allowed since the last step that allowed no more
        self._num_steps = 0  # that have allowed more, without a break

    def lengths(self, requests: Sequence[Request]) -> dict[str, int]:
        return lengths_of(requests, self.step(sum(request.decoding for request in requests)))

    def allowed(self, num_decoding: int) -> int:
        """What the table says of so many decoding requests; of none what it says of one."""
        return self.table[bisect_right(self._starts, max(1, num_decoding)) - 1][2]

    def step(self, num_decoding: int) -> int:
        """K of the next step."""
        allowed = self.allowed(num_decoding)
        if allowed <= self._length:
            self._length, self._num_steps = allowed, 0
            return allowed
        self._rise = min(self._rise, allowed) if self._num_steps else allowed
        self._num_steps += 1
        if self._num_steps == STEPS_TO_RISE:
            self._length, self._num_steps = self._rise, 0
        return self._length


def lengths_of(requests: Sequence[Request], length: int) -> dict[str, int]:
    """`length` for each request, or less where it asks for less."""
    return {r.request_id: length if r.max_draft_tokens is None else min(length, r.max_draft_tokens) for r in requests}


def make_control(config: SpeculativeConfig | None) -> Control:
    """The policy that a configuration asks for."""
    if config is not None and config.num_speculative_tokens_per_batch_size:
        return LengthByBatchSize(config.num_speculative_tokens_per_batch_size)
    return FixedLength(0 if config is None else config.num_speculative_tokens)
