"""What a check found: rows, and in words what they show and what they do not. No torch here."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.errors import ConfigError
from forerun.spec.rules import NO


class Outcome(enum.StrEnum):
    SAME = "same"  # every token, text, end and log-probability
    HOLDS = "holds"  # the law is the target's, as far as the draws can tell
    NOTHING = "nothing"  # nobody drafted, or nothing was left to chance
    DIFFERS = "differs"  # a lossy rule does what it says
    FAILED = "FAILED"


class Check(enum.StrEnum):
    GREEDY = "greedy"  # tokens at temperature 0
    SEEDED = "seeded"  # tokens of a seed
    ROWS = "rows"  # the target's distribution after drafted tokens, and after the same tokens as output
    LAW = "law"  # the distribution of draws
    RULE = "rule"  # what it promises


@dataclass
class Row:
    """One check of one parameter with one proposer.

    Attributes:
        num_tokens: compared, or drawn.
        num_drafted, num_accepted: drafted tokens that were judged in it, and those that stood.
        p_value: of a law: the chance of draws as far off as these where the law holds.
        detectable: the least fault that the row finds with 99 %: of tokens the share that is changed, of a law the
            total variation. None where it shows nothing.
        detail: what went wrong, or what should be known.
    """

    check: Check
    proposer: str
    parameter: str
    outcome: Outcome
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    p_value: float | None = None
    detectable: float | None = None
    detail: str = ""


@dataclass
class Report:
    """All rows of a check of one engine.

    Attributes:
        lossless: what the rule promises: "path", "law" or "no".
        words: what was checked, how sure it is, and what was not checked.
    """

    model: str
    speculative_config: dict[str, Any]
    rule: str
    lossless: str
    rows: list[Row] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.outcome is Outcome.FAILED]

    @property
    def passed(self) -> bool:
        """No row failed, and at least one showed something."""
        return not self.failed and any(row.outcome is not Outcome.NOTHING for row in self.rows)

    def as_object(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def check_expectation(rule: str, lossless: str, expect_lossy: bool) -> None:
    """Raises ConfigError where a rule is said to be lossy that is not."""
    if expect_lossy and lossless != NO:
        raise ConfigError(f"--expect-lossy goes with a rule that is lossy, and {rule!r} is not: leave it out")
