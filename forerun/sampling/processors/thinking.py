"""`thinking_token_budget`: reasoning that has lasted so many tokens is ended by writing its end tag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from torch import Tensor

from forerun.errors import RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.parsers.formats import ReasoningFormat
from forerun.request import Request
from forerun.sampling.batch import SamplingRows
from forerun.sampling.processors.interface import LogitsProcessor
from forerun.sampling.processors.places import NEGATIVE_INFINITY, Places
from forerun.spec.proposer import Draft


@dataclass(frozen=True, slots=True)
class Thought:
    """How far a request's reasoning has come.

    Attributes:
        num_tokens: of the output so far.
        text, token_ids: its end, as far as a tag may have begun there.
        ended: the end tag has been written, by the model or by force.
    """

    num_tokens: int = 0
    text: bytes = b""
    token_ids: tuple[int, ...] = ()
    ended: bool = False


class ThinkingBudget(LogitsProcessor):
    """Counts the output's tokens up to the end tag, which is known by its text, however it is tokenised.

    Args:
        format: the tags; None where the server was not told: requests with a budget are refused.
    """

    def __init__(self, tokenizer: Tokenizer, format: ReasoningFormat | None) -> None:
        self._tokenizer = tokenizer
        self._format = format
        self._end = format.end.encode() if format else b""
        self._end_ids = tokenizer.encode(format.end, add_special_tokens=False) if format else []
        self._thoughts: dict[str, Thought] = {}

    def start(self, request: Request) -> bool:
        if request.params.thinking_token_budget is None:
            return False
        if self._format is None:
            raise RequestError(
                "thinking_token_budget needs a server that knows the tags of reasoning: start it with "
                "--reasoning-parser, or leave it out",
                "thinking_token_budget",
            )
        if not self._format.begins_inside_after(request.token_ids[: request.num_prompt_tokens], self._tokenizer):
            return False
        self._thoughts[request.request_id] = Thought()
        return True

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        forced: dict[int, int] = {}  # row -> token id
        for r in rows:
            thoughts, own = [self._thoughts[r.request_id]], draft.of(r.request_id)
            for node, token_id in enumerate(own.tokens):
                thoughts.append(self._follow(thoughts[1 + own.parent(node)], token_id))
            for row, thought in enumerate(thoughts, r.first_row):
                if not thought.ended and thought.num_tokens >= (r.params.thinking_token_budget or 0):
                    forced[row] = self._next_of_tag(thought)
        places = Places()
        for row, token_id in forced.items():
            logits[row] = NEGATIVE_INFINITY
            places.add([row], np.array([token_id]))
        if forced:
            places.on(logits).put(0.0)

    def accept(self, request: Request, token_ids: Sequence[int]) -> None:
        self._thoughts[request.request_id] = reduce(self._follow, token_ids, self._thoughts[request.request_id])

    def forget(self, request_id: str) -> None:
        self._thoughts.pop(request_id, None)

    def _follow(self, thought: Thought, token_id: int) -> Thought:
        if thought.ended:
            return thought
        text = thought.text + self._tokenizer.token_bytes(token_id)
        token_ids = (*thought.token_ids, token_id)[-len(self._end_ids) :]
        return Thought(thought.num_tokens + 1, text[-len(self._end) :], token_ids, self._end in text)

    def _next_of_tag(self, thought: Thought) -> int:
        """The tag's token that follows as much of the tag as the output ends with."""
        tag = tuple(self._end_ids)
        most = min(len(thought.token_ids), len(tag) - 1)
        written = next(n for n in range(most, -1, -1) if thought.token_ids[len(thought.token_ids) - n :] == tag[:n])
        return tag[written]
