"""What a proposer is given and what it gives back. `proposers/` holds one method a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forerun.attention import Segment
    from forerun.attention.slots import SlotBatch
    from forerun.engine.plan import Hidden, Plan
    from forerun.engine.slots import Slots
    from forerun.memory.groups import GroupSpec
    from forerun.models.config import DecoderConfig
    from forerun.models.decoder import Decoder
    from forerun.models.tokenizer import Tokenizer
    from forerun.request import Request
    from forerun.spec.verifier import Verdict


@dataclass(slots=True, frozen=True, eq=False)
class RequestDraft:
    """The tokens guessed for one request. A chain unless `parents` is given.

    Attributes:
        tokens: drafted ids, in target ids. On a tree a node comes after its parent.
        source: the proposer's name, for statistics.
        parents: index of each token's parent among `tokens`, -1 for the root (the last known token). None: a chain.
        probs: [K, V] the distribution each token was drawn from; None where the draft is one-hot.
        confidence: the proposer's own estimate that each token stands, in (0, 1); None where it has none.
        num_cached: drafted tokens, from the first on, whose keys and values are in the proposer's own cache: those
            that are accepted need not be computed again there.
    """

    tokens: list[int]
    source: str = ""
    parents: list[int] | None = None
    probs: Tensor | None = None
    confidence: list[float] | None = None
    num_cached: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def depth(self, node: int) -> int:
        """1 for a child of the root."""
        depth = 1
        while (node := self.parent(node)) >= 0:
            depth += 1
        return depth

    def cut(self, num_tokens: int) -> RequestDraft:
        """The first `num_tokens` nodes. Parents come before children, so what is left is a draft again."""
        if num_tokens >= len(self.tokens):
            return self
        return RequestDraft(
            self.tokens[:num_tokens],
            self.source,
            None if self.parents is None else self.parents[:num_tokens],
            None if self.probs is None else self.probs[:num_tokens],
            None if self.confidence is None else self.confidence[:num_tokens],
            min(self.num_cached, num_tokens),
        )

    def keep(self, nodes: Sequence[int]) -> RequestDraft:
        """These nodes alone, in order: each with its parent, so that what is left is a draft again."""
        assert self.probs is None
        places = {node: place for place, node in enumerate(nodes)}
        same = next((place for place, node in enumerate(nodes) if place != node), len(nodes))
        return RequestDraft(
            [self.tokens[node] for node in nodes],
            self.source,
            None if self.parents is None else [places.get(self.parents[node], -1) for node in nodes],
            None,
            None if self.confidence is None else [self.confidence[node] for node in nodes],
            min(self.num_cached, same),
        )


EMPTY_DRAFT = RequestDraft([])


class Constraint(Protocol):
    """Knows of some requests which tokens can never stand, before they are verified."""

    def constrains(self, request: Request) -> bool:
        """Whether it knows anything of this request."""
        ...

    def cut(self, request: Request, draft: RequestDraft) -> RequestDraft:
        """What of a draft can stand: of a chain the longest such prefix, of a tree the nodes on such paths.

        A draft with `probs` keeps the first token that cannot. Such a token has to be rejected by the verifier: what
        follows is then drawn from the residual, and dropping it instead would leave the drawn tokens that remain to
        another law than `probs`. All that comes after it is never looked at, so that cutting there changes nothing.
        """
        ...

    def forced(self, request: Request, most: int) -> list[int]:
        """Tokens that must follow, at most so many; [] where there is a choice."""
        ...


@dataclass(slots=True)
class Draft:
    """The drafts of one step, by request id. A request without an entry has an empty draft.

    Attributes:
        filled: (cache group, request id) -> known tokens of the request whose keys and values the proposer's cache
            holds now; no entry where nothing was computed.
    """

    by_request: dict[str, RequestDraft] = field(default_factory=dict)
    filled: dict[tuple[int, str], int] = field(default_factory=dict)

    def of(self, request_id: str) -> RequestDraft:
        return self.by_request.get(request_id, EMPTY_DRAFT)


@dataclass(slots=True)
class Grant:
    """How far each request may draft in this step.

    Blocks of a proposer's own cache group are set aside as far as there are any: `request.caches[place].blocks`.

    Attributes:
        requests, lengths: those that may draft, and how far. Others (prompts under way, requests about to end) must
            not.
        filling: requests whose prompts are under way and who may draft after them: a proposer may fill its cache with
            the tokens that the target has computed.
    """

    requests: list[Request] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    filling: list[Request] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetInfo:
    """What a proposer is made for.

    Attributes:
        name: of the model, for messages.
        model, tokenizer: the target's.
        max_model_len: longest request, tokens.
        block_size: tokens a cache block.
        max_num_seqs, max_num_batched_tokens: most requests, and most rows, of a step.
        kv_dtype: of the target's keys and values.
        packed: whether weights stay as the checkpoint stores them.
        constraint: what is known of requests' texts beforehand; None: nothing.
    """

    name: str
    model: Decoder
    tokenizer: Tokenizer
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_dtype: torch.dtype
    packed: bool
    constraint: Constraint | None = None

    @property
    def config(self) -> DecoderConfig:
        return self.model.config


UNKNOWN = -1  # stands for a drafted token that only the device has seen


@dataclass(slots=True, frozen=True)
class KnownRows:
    """Rows of prompts in a pass, one request after the other.

    Attributes:
        segments: the tokens of each request that were computed.
        samples: whether a request's next token was drawn; the next one is part of its prompt otherwise.
    """

    requests: Sequence[Request]
    segments: Sequence[Segment]
    samples: Sequence[bool]


@dataclass(slots=True)
class DraftInputs:
    """What a proposer may look at. Read only; valid until the step's `commit`.

    Attributes:
        requests: those that may draft in this step (`grant.lengths` says how far), in batch order. Their `token_ids`
            end with the token whose successor is to be guessed.
        target: handles to the target's embedding, output head and caches, for heads that share them; None for
            proposers that work on token ids alone.
    """

    requests: Sequence[Request]
    target: object | None = None


class Proposer(Protocol):
    """Guesses the next tokens of running requests. A wrong guess costs time, never correctness.

    Classes inherit what stands here for those that keep nothing: no taps, no cache, no state.
    """

    name: str
    hidden_taps: tuple[tuple[int, bool], ...] = ()
    """Target states to be handed to `observe`: (layer, after the final norm). () for none."""
    group: GroupSpec | None = None
    """The cache group of its own that it needs; None where it keeps no keys and values."""
    notes: Sequence[str] = ()
    """What the start-up log should say about it."""

    def attach(self, place: int, memory: Tensor) -> None:
        """Called once, before the first step, where there is a group: `request.caches[place]` are the blocks that a
        request holds of it in `memory`, uint8 [bytes]: the pool of all groups, or its own beside the target's."""
        return None

    def propose(self, inputs: DraftInputs, grant: Grant) -> Draft:
        """Drafts of at most `grant.lengths[id]` tokens; no entry, or an empty one, where nothing is worth trying."""
        ...

    def observe(self, plan: Plan, verdict: Verdict, hidden: Hidden | None) -> None:
        """Called once a step after verification and before anything is published, with the rows that stand."""
        return None

    serves_slots: bool = False
    """Whether it can also draft and follow by tables on the device, without a wait of the host: by the four below."""

    def attach_slots(self, slots: Slots, shapes: Sequence[tuple[int, int]]) -> None:
        """Called once, before the first step, where steps are launched ahead. shapes: (requests, tokens of each) of the
        drafts that are worth a CUDA graph; () where there are none."""
        return None

    def draft_slots(self, slots: Slots, grant: Grant) -> Draft:
        """As `propose`, into `slots.tables.drafted`: the drafts returned hold `UNKNOWN` for each token. The slots of
        `grant.requests` are true; what the requests themselves say may be a step old."""
        return Draft()

    def follow_slots(
        self, batch: SlotBatch, positions: Tensor, verdict: Tensor, taps: Mapping[tuple[int, bool], Tensor]
    ) -> None:
        """As `observe`, for rows whose requests drafted, or might have.

        Args:
            batch: the rows of the target's pass.
            positions: [B] int32, of each slot's first row. `batch.tables` are a step further.
            verdict: [n, 2 + W] int32, see `sampling.slots.judge`, of the first n slots; the others are padding.
            taps: [B * W, H] for each of `hidden_taps`.
        """
        return None

    def follow_known(self, rows: KnownRows, verdict: Tensor | None, taps: Mapping[tuple[int, bool], Tensor]) -> None:
        """As `observe`, for prompts.

        Args:
            verdict: [n, 3] int32, of the n requests that sampled; None: none did.
            taps: [T, H] for each of `hidden_taps`.
        """
        return None

    def forget(self, request_id: str) -> None:
        """The request finished, was aborted or was preempted: drop its state. Unknown ids are ignored."""
        return None

    @property
    def times_s(self) -> dict[str, float]:
        """Seconds spent so far by each of the proposers that this one asks; {} for one that asks none."""
        return {}

    @property
    def state_bytes(self) -> int:
        """Bytes of state held for all requests, for the memory figures. Cache groups are not among them."""
        return 0
