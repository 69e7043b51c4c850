"""Suffix decoding: go on as the request's own history, or the answers before it, most often did. No torch here.

Source: Oliaro et al. 2024, arXiv 2411.04975; rules and defaults as in vLLM's `suffix`, but for two things. An answer
enters the cache when it has ended, at once and as a whole: so preemptions neither lose nor repeat a part of it, aborted
ones leave nothing, and no request can watch another. And answers are forgotten by halves (`response_cache.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from forerun.spec.proposer import RequestDraft
from forerun.spec.proposers.history import HistoryIndex, HistoryProposer
from forerun.spec.response_cache import ResponseCache
from forerun.spec.suffix_tree import SuffixTree

if TYPE_CHECKING:
    from forerun.engine.plan import Hidden, Plan
    from forerun.request import Request
    from forerun.spec.config import MethodConfig
    from forerun.spec.verifier import Verdict

# Tokens of ended answers that a step takes in, so that many that end together do not hold up the others.
MAX_ENTERED_PER_STEP: Final = 2048


class SuffixProposer(HistoryProposer):
    """Weighs every suffix of the request that occurred before, and follows the counts of what came next.

    The draft's `confidence` is the estimated chance that a token and all those before it stand; 1 is never reached,
    as the occurrence that is being continued counts among those of its context.

    With a cache, the answers of ended requests of the same `cache_salt` are asked too, and the draft with the higher
    score is taken, the request's own if they are equal.

    Args:
        max_tree_depth: longest match and draft together, tokens.
        max_spec_factor: a match of m tokens drafts at most m * max_spec_factor tokens.
        min_token_prob: a draft ends before its confidence falls below this.
        num_speculative_tokens: most tokens drafted.
        max_cached_requests: most answers remembered, of all salts; 0 for no cache.
        max_cached_bytes: most memory for them, of all salts.
    """

    name = "suffix"

    def __init__(
        self,
        max_tree_depth: int,
        max_spec_factor: float,
        min_token_prob: float,
        num_speculative_tokens: int,
        max_cached_requests: int = 0,
        max_cached_bytes: int = 0,
    ) -> None:
        super().__init__(num_speculative_tokens)
        self.max_tree_depth = max_tree_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self.cache = ResponseCache(self._new_tree, max_cached_requests, max_cached_bytes)

    @classmethod
    def from_config(cls, config: MethodConfig) -> SuffixProposer:
        return cls(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            config.max_draft_tokens,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_cached_bytes,
        )

    def new_index(self, request: Request) -> SuffixIndex:
        return SuffixIndex(self._new_tree(), self.cache, request.cache_salt)

    def observe(self, plan: Plan, verdict: Verdict, hidden: Hidden | None) -> None:
        super().observe(plan, verdict, hidden)
        self.cache.enter(MAX_ENTERED_PER_STEP)

    def finish(self, request: Request, index: HistoryIndex, token_ids: Sequence[int]) -> None:
        self.cache.add(request.cache_salt, [*request.output_token_ids, *token_ids])

    @property
    def state_bytes(self) -> int:
        return super().state_bytes + self.cache.num_bytes

    def _new_tree(self) -> SuffixTree:
        return SuffixTree(self.max_tree_depth, self.max_spec_factor, self.min_token_prob)


class SuffixIndex:
    """The tree of one request, beside the answers of its salt."""

    __slots__ = ("_cache", "_salt", "tree")

    def __init__(self, tree: SuffixTree, cache: ResponseCache, salt: str) -> None:
        self.tree = tree
        self._cache = cache
        self._salt = salt

    @property
    def num_tokens(self) -> int:
        return self.tree.num_tokens

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        self.tree.extend(token_ids[self.tree.num_tokens : end])

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> RequestDraft:
        own = self.tree.speculate(max_tokens)
        shared = self._cache.speculate(self._salt, token_ids, max_tokens)
        found = shared if shared.score > own.score else own
        return RequestDraft(found.tokens, SuffixProposer.name, confidence=found.probs)

    @property
    def num_bytes(self) -> int:
        return self.tree.num_bytes
