"""Masks the logits of constrained requests, and tells proposers what their grammars allow and force."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from forerun.errors import RequestError
from forerun.parsers.formats import ReasoningFormat
from forerun.sampling.processors.interface import LogitsProcessor
from forerun.sampling.processors.places import NEGATIVE_INFINITY
from forerun.spec.proposer import Draft, RequestDraft
from forerun.structured.request import FIELD, StructuredOutputs

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.models.tokenizer import Tokenizer
    from forerun.request import Request
    from forerun.sampling.batch import SamplingRows
    from forerun.structured.compiler import Compiler
    from forerun.structured.guide import Guide, Mask
    from forerun.structured.reasoning import EndTag


class StructuredProcessor(LogitsProcessor):
    """Holds a `Guide` for each constrained request. Comes last of all processors: what it leaves is drawn from.

    Args:
        tokenizer: of the target.
        eos_token_ids: every token that ends a text.
        reasoning: the tags of `--reasoning-parser`; None: texts have no reasoning.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Collection[int], reasoning: ReasoningFormat | None = None
    ) -> None:
        self._tokenizer = tokenizer
        own = tokenizer.hf.eos_token_id
        self._eos_ids = sorted(eos_token_ids, key=lambda i: (i != own, i))
        self._reasoning = reasoning
        self._guides: dict[str, Guide] = {}

    # -- LogitsProcessor

    def start(self, request: Request) -> bool:
        if request.params.structured_outputs is None:
            return False
        from forerun.structured.guide import Guide

        asked = StructuredOutputs.parse(request.params.structured_outputs)
        if not self._eos_ids:
            raise RequestError(f"{FIELD} needs a model with an end token, and this one names none", FIELD)
        compiler = self._compiler
        self._guides[request.request_id] = Guide(
            compiler.matcher(asked),
            functools.partial(compiler.fresh, asked),
            self._end_tag_for(request),
            self._eos_ids,
            request.params.ignore_eos,
        )
        return True

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        num_rows = sum(r.num_rows for r in rows)
        masks = np.full((num_rows, -(-logits.shape[1] // 32)), -1, np.int32)
        first = 0
        for r in rows:
            guide = self._guides[r.request_id]
            own = masks[first : first + r.num_rows]
            visited = [False] * r.num_rows
            for node in guide.walk(draft.of(r.request_id)):
                guide.fill(own[1 + node])
                visited[1 + node] = True
            if guide.trial_error:  # rows behind it may be reached, and nothing is known of them
                own[[not seen for seen in visited]] = 0
            first += r.num_rows
        places = [place for r in rows for place in range(r.first_row, r.first_row + r.num_rows)]
        apply_masks(logits, places, masks)

    def accept(self, request: Request, token_ids: Sequence[int]) -> None:
        self._guides[request.request_id].commit(token_ids)

    def forget(self, request_id: str) -> None:
        self._guides.pop(request_id, None)

    def fault(self, request_id: str) -> RequestError | None:
        guide = self._guides[request_id]
        if guide.error or guide.trial_error:
            return RequestError(f"{FIELD} cannot be followed any further: {guide.error or guide.trial_error}", FIELD)
        return RequestError(
            f"{FIELD} contradicts the other parameters: of the tokens that the grammar allows they leave none", FIELD
        )

    # -- what proposers ask, see `forerun.spec.proposer.Constraint`

    def constrains(self, request: Request) -> bool:
        return request.request_id in self._guides

    def cut(self, request: Request, draft: RequestDraft) -> RequestDraft:
        return cut_draft(draft, sorted(node for node in self._guides[request.request_id].walk(draft) if node >= 0))

    def forced(self, request: Request, most: int) -> list[int]:
        guide = self._guides.get(request.request_id)
        return guide.forced(most) if guide is not None else []

    # -- made when first needed: a server that nobody asks for a form need not have them

    @functools.cached_property
    def _tokens(self) -> list[bytes]:
        return [self._tokenizer.token_bytes(i) for i in range(self._tokenizer.vocab_size)]

    @functools.cached_property
    def _compiler(self) -> Compiler:
        try:
            from forerun.structured.compiler import Compiler, Vocabulary
        except ImportError as error:
            raise RequestError(f"{FIELD} is not served: llguidance cannot be imported ({error})", FIELD) from None

        tokenizer = self._tokenizer
        special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
        encode: Callable[[str], list[int]] = functools.partial(tokenizer.encode, add_special_tokens=False)
        return Compiler(Vocabulary(self._tokens, special, self._eos_ids, encode))

    @functools.cached_property
    def _end_tag(self) -> EndTag:
        from forerun.structured.reasoning import EndTag

        assert self._reasoning is not None
        return EndTag(self._reasoning.end, self._tokens)

    def _end_tag_for(self, request: Request) -> EndTag | None:
        if self._reasoning is None:
            return None
        prompt = request.token_ids[: request.num_prompt_tokens]
        return self._end_tag if self._reasoning.begins_inside_after(prompt, self._tokenizer) else None


def cut_draft(draft: RequestDraft, allowed: Sequence[int]) -> RequestDraft:
    """A draft without the nodes that are not allowed; with `probs` the first of these stays, see `Constraint.cut`.

    Args:
        allowed: nodes, in order, each with its parent.
    """
    if draft.probs is not None:
        return draft.cut(len(allowed) + 1)
    return draft if len(allowed) == len(draft) else draft.keep(allowed)


def apply_masks(logits: Tensor, places: Sequence[int], masks: Mask) -> None:
    """Put minus infinity where a token is not allowed, in place.

    Args:
        logits: [R, V] float32.
        places: the N rows that are masked.
        masks: [N, ceil(V / 32)] int32, bit i % 32 of word i // 32 set where id i is allowed.
    """
    size = logits.shape[1]
    if logits.is_cpu:  # by numpy: torch's threads wait for the cores longer than this takes
        rows = logits.numpy()
        forbidden = np.unpackbits(masks.view(np.uint8), axis=1, count=size, bitorder="little") == 0
        for place, own in zip(places, forbidden, strict=True):
            np.copyto(rows[place], NEGATIVE_INFINITY, where=own)
        return
    index = torch.tensor(places, device=logits.device)
    octets = torch.from_numpy(masks).to(logits.device).view(torch.uint8)  # little-endian: bit i of octet i // 8
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((octets.unsqueeze(-1) >> bits) & 1).flatten(1)[:, :size]
    logits[index] = logits[index].masked_fill(allowed == 0, NEGATIVE_INFINITY)
