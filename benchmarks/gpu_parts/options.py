"""What the parts are told."""

from __future__ import annotations

from dataclasses import dataclass

SETTLE = 4  # steps that pass before any are timed
WINDOW_STEPS = 16  # of the `verify` part, between changes of sides
VERIFY_ROUNDS = 5
SKEW = 3  # tokens a request may gain in a step, as a mean of many


@dataclass(frozen=True)
class Options:
    """Attributes:
    batch: numbers of requests, ascending.
    prompt: random tokens of each.
    steps: timed for each figure of `plain`, `eagle3` and their profiles.
    rounds: new batches for each figure of `plain` and `eagle3`.
    shapes: name of the target; layers: other than its own number, 0: its own.
    device: "cuda", or "cpu" for trying the script out.
    """

    batch: tuple[int, ...]
    prompt: int
    steps: int
    rounds: int
    shapes: str
    layers: int
    device: str

    @property
    def published(self) -> bool:
        """Whether the work is that of the peers' figures."""
        return self.shapes == "qwen3-8b" and not self.layers and self.prompt == 1000 and self.device == "cuda"

    def room(self, rows_a_step: int) -> int:
        """Tokens that the requests of the largest batch gain until they are timed and while they are."""
        filling = -(-max(self.batch) * self.prompt // rows_a_step) + 2
        timed = SKEW * (filling + self.steps + SETTLE)
        sides = filling + 2 * VERIFY_ROUNDS * (WINDOW_STEPS + SETTLE)
        return 64 + max(timed, sides)
