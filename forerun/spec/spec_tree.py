"""`spec_tree`: reading the shape of a dynamic draft tree. What it means is in `spec/tree.py`. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from forerun.spec.refusal import did_you_mean, quoted, refuse, show

KEY = "spec_tree"
EXAMPLE = '{"depth": 4, "top_k": 8, "num_draft_tokens": 24}'
MAX_TOKENS = 1024  # most tokens of a draft, of whatever shape
BOUNDS = {"depth": (1, 16), "top_k": (1, 32), "num_draft_tokens": (1, MAX_TOKENS)}


@dataclass(frozen=True)
class SpecTree:
    """The shape of a dynamic draft tree.

    Attributes:
        depth: passes of the head after the first, each of which expands a frontier: a path has up to depth + 1 tokens.
        top_k: children of a node, and nodes of a frontier.
        num_draft_tokens: the most probable nodes that are verified.

    Raises:
        ConfigError: a value that is no whole number or out of bounds, or more tokens than such a tree has.
    """

    depth: int
    top_k: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                refuse(f"{KEY}.{name} must be an integer ({low} to {high}), got {show(value)}")
        if self.num_draft_tokens > self.num_nodes:
            refuse(
                f"{KEY}.num_draft_tokens={self.num_draft_tokens} must not be above {self.num_nodes}, the nodes of a "
                f"tree of depth={self.depth} and top_k={self.top_k}"
            )

    @property
    def num_nodes(self) -> int:
        """All that are drafted, of which the best are verified."""
        return self.top_k + self.depth * self.top_k**2

    def as_json(self) -> dict[str, int]:
        return asdict(self)


def read_tree(value: object) -> SpecTree:
    """The tree that an object means; `-` in the name of a key reads as `_`.

    Raises:
        ConfigError: no object, a key that is unknown, missing or given twice, a value as in `SpecTree`.
    """
    if isinstance(value, SpecTree):
        return value
    if not isinstance(value, Mapping):
        refuse(f"{KEY} must be an object such as {EXAMPLE}, got {show(value)}")
    given: dict[str, int] = {}
    for key, number in value.items():
        name = str(key).replace("-", "_")
        if name not in BOUNDS:
            refuse(f"{KEY}: unknown key {show(key)}{did_you_mean(name, BOUNDS) or f'; it has {quoted(BOUNDS)}'}")
        if name in given:
            refuse(f"{KEY}: the key {name} is given twice: {show(given[name])} and {show(number)}")
        given[name] = number
    if missing := [name for name in BOUNDS if name not in given]:
        refuse(f"{KEY}={show(value)}: {missing[0]} is missing; give {quoted(BOUNDS)}, such as {EXAMPLE}")
    return SpecTree(**given)
