"""Suffix decoding: continue the request as its own history most often went on. No torch here.

Source: Oliaro et al. 2024, arXiv 2411.04975; rules and defaults as in vLLM's `suffix`, without the cache across
requests. Such a cache would be a second tree: `Speculation.score` is what the two would be compared by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.spec.proposer import RequestDraft
from forerun.spec.proposers.history import HistoryProposer
from forerun.spec.suffix_tree import SuffixTree

if TYPE_CHECKING:
    from forerun.spec.config import MethodConfig


class SuffixProposer(HistoryProposer):
    """Weighs every suffix of the request that occurred before, and follows the counts of what came next.

    The draft's `confidence` is the estimated chance that a token and all those before it stand; 1 is never reached,
    as the occurrence that is being continued counts among those of its context.

    Args:
        max_tree_depth: longest match and draft together, tokens.
        max_spec_factor: a match of m tokens drafts at most m * max_spec_factor tokens.
        min_token_prob: a draft ends before its confidence falls below this.
        num_speculative_tokens: most tokens drafted.
    """

    name = "suffix"

    def __init__(
        self, max_tree_depth: int, max_spec_factor: float, min_token_prob: float, num_speculative_tokens: int
    ) -> None:
        super().__init__(num_speculative_tokens)
        self.max_tree_depth = max_tree_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob

    @classmethod
    def from_config(cls, config: MethodConfig) -> SuffixProposer:
        return cls(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            config.num_speculative_tokens,
        )

    def new_index(self) -> SuffixIndex:
        return SuffixIndex(SuffixTree(self.max_tree_depth, self.max_spec_factor, self.min_token_prob))


class SuffixIndex:
    """The tree of one request."""

    __slots__ = ("tree",)

    def __init__(self, tree: SuffixTree) -> None:
        self.tree = tree

    @property
    def num_tokens(self) -> int:
        return self.tree.num_tokens

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        self.tree.extend(token_ids[self.tree.num_tokens : end])

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> RequestDraft:
        found = self.tree.speculate(max_tokens)
        return RequestDraft(found.tokens, SuffixProposer.name, confidence=found.probs)

    @property
    def num_bytes(self) -> int:
        return self.tree.num_bytes
