"""`bad_words`: token sequences that the output must not hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from forerun.errors import RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.request import Request
from forerun.sampling.batch import SamplingRows
from forerun.sampling.processors.interface import LogitsProcessor, paths
from forerun.sampling.processors.places import Places
from forerun.spec.proposer import Draft


class BadWords(LogitsProcessor):
    """Forbids the last token of a sequence where the output ends with those before it; the prompt does not count."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: dict[str, tuple[Request, _Words]] = {}

    def start(self, request: Request) -> bool:
        if not request.params.bad_words:
            return False
        sequences = [s for word in request.params.bad_words for s in token_sequences(self._tokenizer, word)]
        self._words[request.request_id] = request, _Words(sequences)
        return True

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        places = Places()
        for r in rows:
            request, words = self._words[r.request_id]
            tail = request.token_ids[max(request.num_prompt_tokens, request.num_tokens - words.reach) :]
            for row, path in enumerate(paths(draft.of(r.request_id)), r.first_row):
                places.add([row], np.array(words.forbidden(tail + path), np.int64))
        places.forbid(logits)

    def forget(self, request_id: str) -> None:
        self._words.pop(request_id, None)


def token_sequences(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """The word's tokens at the beginning of a text and after a space, as vLLM has them: the second only where they are
    as many and begin with another token, for else the first is what they end with."""
    word = word.lstrip()
    try:
        bare, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
    except RequestError as error:
        raise RequestError(f"bad_words: {error}", "bad_words") from error
    return [bare, spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]


class _Words:
    """Sequences by the token that comes before their last one, so that a row looks at few of them."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._always: list[int] = []
        self._after: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        self.reach = 0  # most tokens that come before a last one
        for *before, last in sequences:
            self.reach = max(self.reach, len(before))
            if before:
                self._after[before[-1]].append((before, last))
            else:
                self._always.append(last)

    def forbidden(self, output: list[int]) -> list[int]:
        """The tokens that must not follow this end of the output."""
        candidates = self._after.get(output[-1], ()) if output else ()
        return self._always + [last for before, last in candidates if output[-len(before) :] == before]
