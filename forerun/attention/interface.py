"""What a backend is given for a step, and what it must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from forerun.kernels.fused import rope_qk

if TYPE_CHECKING:
    from forerun.attention.slots import BlockTables, SlotBatch, SlotRows

GPU_ROW_TILE = 16  # most rows of a QueryTile on a GPU


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one group: paged, one block table for all of its layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    def block_bytes(self, element_bytes: int) -> int:
        """2 x layers x tokens x kv_heads x head_dim x bytes."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What the layers of a model attend with: all that a backend must know of it.

    Attributes:
        scale: of the products of query and key, which make the scores.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
        windows: a layer's window: a token sees so many tokens, itself included; None: all. () where no layer has one.
        invariant: on a GPU too a row's bits must not depend on the other rows of a step, nor on how many of its own
            request there are. On a CPU they never do.
    """

    shape: KVShape
    num_heads: int
    scale: float
    softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    invariant: bool = False

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Consecutive rows of one path of one request, attended together.

    A path is the request's committed tokens followed by tokens of this step, root to leaf. A chain has one path; a
    tree has one for each leaf, so that a row adds up its keys in the order in which plain decoding would.

    Attributes:
        rows: rows of the step, in path order.
        first_position: position of the first of them; the others follow one by one. A row at position p sees the
            path's tokens 0..p, or as many of the last of these as its layer's window holds.
        block_table: the request's blocks.
        path_slots: cache slots (block * block_size + offset) of the path's tokens from `path_start` on, where they
            do not lie at their own positions; empty for a chain.
    """

    rows: Sequence[int]
    first_position: int
    block_table: Sequence[int]
    path_start: int = 0
    path_slots: Sequence[int] = ()

    @property
    def num_keys(self) -> int:
        return self.first_position + len(self.rows)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where a step's rows go: slots [T] int64 in the cache, and the tiles that read it."""

    slots: Tensor
    tiles: Sequence[QueryTile]


@dataclass(frozen=True, slots=True)
class Rope:
    """What is yet to be done to query and key heads: RMS norm where there are weights, then rotation. Attributes as the
    arguments of `kernels.fused.rope_qk`."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The product that the attention of a layer starts from. Whoever takes it uses it up: heads are normed and rotated
    in place, or on their way into the cache.

    Attributes:
        product: [T, (num_heads + 2 * num_kv_heads) * D], a row's query, key and value heads side by side.
        num_heads: 0 where rows are only written.
        rope: None: it is done.
    """

    product: Tensor
    num_heads: int
    num_kv_heads: int
    rope: Rope | None = None

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `rope` asks for, done in place, so call it once: query [T, num_heads, D], key and value
        [T, num_kv_heads, D], views of the product. A row's heads are contiguous, rows are not."""
        parts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if (rope := self.rope) is not None:
            rope_qk(self.product, rope.cos, rope.sin, *parts[:2], rope.q_norm, rope.k_norm, rope.eps)
        num_rows, width = self.product.shape
        query, key, value = self.product.view(num_rows, sum(parts), width // sum(parts)).split_with_sizes(parts, 1)
        return query, key, value


class AttentionBackend(Protocol):
    """Owns the keys and values of one cache group."""

    row_tile: int
    """Most rows a QueryTile may have."""

    title: str
    """What attends, for the log."""

    def begin(self, layout: StepLayout) -> None:
        """The layout of the step whose layers are attended next."""
        ...

    def begin_slots(self, batch: SlotBatch, blocks: BlockTables) -> SlotRows:
        """The same for rows that the tables on the device place: the rows that a model is to be given, whose layers are
        attended next."""
        ...

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Write the step's keys and values of a layer, then attend.

        Args:
            inputs: of T rows, which may be more than the layout's: the rest is padding.
        Returns:
            [T, heads, D]; padding rows are zero.
        """
        ...

    def write(self, layer: int, inputs: AttentionInputs) -> None:
        """Write the step's keys and values of a layer, and nothing else. Ends the step."""
        ...

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        """Copy the tokens at source slots to target slots in all layers (the accepted path of a tree)."""
        ...
