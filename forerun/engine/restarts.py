"""How often a dead core is started again, and after which pauses. Nothing is started here."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
SETTLED_S = 300.0  # a core that lived so long died of something else than its start or its first requests


class Restarts:
    """Counts restarts in a row. Each waits twice as long as the one before; a core that settled ends the row.

    Args:
        limit: most restarts in a row; 0: none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_row = 0

    def next_delay(self, lived_s: float) -> float | None:
        """Seconds to wait before the next restart, or None where no other one may follow.

        Args:
            lived_s: how long the core that just died had lived.
        """
        if lived_s >= SETTLED_S:
            self._in_row = 0
        if self._in_row >= self._limit:
            return None
        delay_s = min(FIRST_DELAY_S * 2.0**self._in_row, LONGEST_DELAY_S)
        self._in_row += 1
        return delay_s
