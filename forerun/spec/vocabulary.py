"""Whether and how a draft model's token ids stand for the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer

FEWEST_SHARED_TOKENS = 100
WORD_START_MARKS = ("\u0120", "\u2581")  # how byte-level and sentencepiece vocabularies write a leading space


class Vocabulary(Protocol):
    """How the ids of a draft's logits stand for the target's."""

    def to_draft(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Target ids as the draft is fed them."""
        ...

    def to_target(self, token_id: int) -> int:
        """The target id of a place in what `restrict` returns."""
        ...

    def fed(self, token_ids: Tensor) -> Tensor:
        """As `to_draft`: [N] int64, on any device."""
        ...

    def target_ids(self, places: Tensor) -> Tensor:
        """As `to_target`: [N] int64, on any device."""
        ...

    def restrict(self, logits: Tensor) -> Tensor:
        """logits [R, Vd] -> [R, n] in which only what may be drafted is above minus infinity."""
        ...

    def in_target_ids(self, logits: Tensor) -> Tensor:
        """A row of what `restrict` returns -> [at most V], by target ids."""
        ...


class SameVocabulary:
    """One tokenizer on both sides; the models may pad their vocabularies differently.

    Args:
        size: ids below it may be drafted.
        draft_size: ids that the draft model knows; one beyond enters it as id 0.
        never: ids that may not be drafted (a mask token).
    """

    def __init__(self, size: int, draft_size: int, never: Sequence[int] = ()) -> None:
        self.size = size
        self._draft_size = draft_size
        self._never = [token for token in never if token < size]

    def to_draft(self, token_ids: Sequence[int]) -> Sequence[int]:
        return [token if token < self._draft_size else 0 for token in token_ids]

    def to_target(self, token_id: int) -> int:
        return token_id

    def fed(self, token_ids: Tensor) -> Tensor:
        return torch.where(token_ids < self._draft_size, token_ids, 0)

    def target_ids(self, places: Tensor) -> Tensor:
        return places

    def restrict(self, logits: Tensor) -> Tensor:
        """logits [R, V] of the draft model -> [R, size]: only what may be drafted."""
        logits = logits[:, : self.size]
        if self._never:
            logits = logits.clone()
            logits[:, self._never] = float("-inf")
        return logits

    def in_target_ids(self, logits: Tensor) -> Tensor:
        return logits


class SharedTokens:
    """Two tokenizers: only tokens that are written alike on both sides are drafted; others enter the draft model as
    its unknown token.

    Source: token-level intersection, Timor et al. 2025, arXiv 2502.05202; the rules for strings are those of vLLM.

    Args:
        target, draft: the tokenizers.
        target_size, draft_size: ids that the models know.
    Raises:
        ConfigError: the draft's tokenizer has neither an unknown nor an end token, or too little is shared.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> None:
        fallback = _fallback_id(draft)
        self.warnings: list[str] = []
        if draft.hf.unk_token_id is None:
            self.warnings.append(
                f"the draft's tokenizer has no unknown token: {fallback}, its end token, stands for what it lacks"
            )
        draft_ids = {text: i for text, i in _normalised(draft).items() if i < draft_size}
        shared = {
            draft_ids[text]: i for text, i in _normalised(target).items() if i < target_size and text in draft_ids
        }
        self.num_shared = len(shared)
        self.shares = self.num_shared / target.vocab_size, self.num_shared / draft.vocab_size
        if self.num_shared < FEWEST_SHARED_TOKENS:
            raise ConfigError(
                f"use_heterogeneous_vocab: target and draft share {self.num_shared} tokens of {target.vocab_size} and "
                f"{draft.vocab_size}, and at least {FEWEST_SHARED_TOKENS} are needed: take another draft model"
            )
        self._to_target = shared
        self._to_draft = [fallback] * target_size
        for draft_id, target_id in shared.items():
            self._to_draft[target_id] = draft_id
        self._draft_table = torch.tensor(self._to_draft)
        self._target_table = torch.tensor([shared.get(draft_id, 0) for draft_id in range(draft_size)])
        self._forbidden = torch.ones(draft_size, dtype=torch.bool)
        self._forbidden[list(shared)] = False

    def to_draft(self, token_ids: Sequence[int]) -> Sequence[int]:
        return [self._to_draft[token] for token in token_ids]

    def to_target(self, token_id: int) -> int:
        return self._to_target[token_id]

    def fed(self, token_ids: Tensor) -> Tensor:
        self._draft_table = self._draft_table.to(token_ids.device)
        return self._draft_table[token_ids]

    def target_ids(self, places: Tensor) -> Tensor:
        self._target_table = self._target_table.to(places.device)
        return self._target_table[places]

    def restrict(self, logits: Tensor) -> Tensor:
        self._forbidden = self._forbidden.to(logits.device)  # once: a model stays where it is
        return logits.masked_fill(self._forbidden[: logits.shape[1]], float("-inf"))

    def in_target_ids(self, logits: Tensor) -> Tensor:
        raise NotImplementedError("drafts in another vocabulary are greedy")  # the configuration says so


class ReducedVocabulary:
    """A head that knows some of the target's tokens, and is fed target ids.

    Args:
        draft_to_target: [Vd] int64, the target id of each draft id; None: they are the same.
        size: of the target's vocabulary.
    """

    def __init__(self, draft_to_target: Tensor | None, size: int) -> None:
        self._draft_to_target = draft_to_target
        self._size = size

    def to_draft(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids

    def to_target(self, token_id: int) -> int:
        return token_id if self._draft_to_target is None else int(self._draft_to_target[token_id])

    def fed(self, token_ids: Tensor) -> Tensor:
        return token_ids

    def target_ids(self, places: Tensor) -> Tensor:
        return places if self._draft_to_target is None else self._draft_to_target[places]

    def restrict(self, logits: Tensor) -> Tensor:
        return logits

    def in_target_ids(self, logits: Tensor) -> Tensor:
        if self._draft_to_target is None:
            return logits
        return logits.new_full((self._size,), float("-inf")).index_copy_(0, self._draft_to_target, logits)


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer, draft_name: str) -> list[str]:
    """Warnings about two tokenizers that give ids the same texts.

    Raises:
        ConfigError: an id has two texts; names the first such id and both.
    """
    target_texts, draft_texts = _texts(target), _texts(draft)
    for token_id in sorted(target_texts.keys() & draft_texts.keys()):
        if target_texts[token_id] != draft_texts[token_id]:
            raise ConfigError(
                f"draft model {draft_name!r} has another tokenizer: id {token_id} is {target_texts[token_id]!r} to the "
                f"target and {draft_texts[token_id]!r} to the draft; take a draft of the target's family, or set "
                '"use_heterogeneous_vocab": true'
            )
    if target.hf.eos_token_id != draft.hf.eos_token_id:
        return [
            f"target and draft end their texts with different tokens ({target.hf.eos_token_id} and "
            f"{draft.hf.eos_token_id}): the draft may be wrong about ends"
        ]
    return []


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: text for text, token_id in tokenizer.hf.get_vocab().items()}


def _fallback_id(tokenizer: Tokenizer) -> int:
    for token_id in (tokenizer.hf.unk_token_id, tokenizer.hf.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ConfigError("use_heterogeneous_vocab: the draft's tokenizer has neither an unknown nor an end token")


def _normalised(tokenizer: Tokenizer) -> dict[str, int]:
    """Text -> id with a leading space written as a space; of two ids that come to be alike the lower one stays."""
    marks = _word_start_marks(tokenizer)
    texts: dict[str, int] = {}
    for token_id, text in sorted(_texts(tokenizer).items()):
        mark = next((mark for mark in marks if text.startswith(mark)), "")
        texts.setdefault(" " + text[len(mark) :] if mark else text, token_id)
    return texts


def _word_start_marks(tokenizer: Tokenizer) -> tuple[str, ...]:
    """How this vocabulary writes a leading space."""
    pieces = tokenizer.hf.convert_ids_to_tokens(tokenizer.encode(" a", add_special_tokens=False))
    if pieces and len(pieces[0]) > 1 and pieces[0].endswith("a"):
        return (pieces[0][:-1],)
    return WORD_START_MARKS
