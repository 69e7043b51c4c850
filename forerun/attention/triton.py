"""Attention on a GPU: paged, a program for each tile of query rows, head of keys, and part of the keys.

The rows of a tile and the query heads that share a head of keys are the rows of one product. Where tiles are few the
keys are split, so that all multiprocessors read at once, and the parts are joined by a second kernel (flash-decoding).
Sums are float32. How keys are split depends on the step, so a row's last bits may depend on its company.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.attention.interface import GPU_ROW_TILE, AttentionInputs, AttentionSpec, Rope, StepLayout
from forerun.attention.layout import TILE_FIELDS, Chunk, flatten_tiles, split_chunks
from forerun.attention.reference import ReferenceAttention
from forerun.attention.slots import BlockTables, SlotBatch, SlotRows
from forerun.attention.triton_prompts import TILE_M, ChunkTables, attend_chunks, filling_rows, place_chunks
from forerun.attention.triton_slots import SlotLayout, lay_out_slots
from forerun.kernels.triton_ops import rope_qk
from forerun.kernels.uploads import upload

PROGRAMS_A_PROCESSOR = 4  # wanted of a launch, as far as keys can be split
JOIN_WIDTHS = (4, 16)  # a kernel for each: parts that it joins at most
LEAST_KEYS = 64  # of a split
FEW_PROGRAMS = 0.5  # a processor: there a program with more keys under way is faster
LONG_CHUNK = 128  # rows of a prompt that are worth a tile of `triton_prompts.py`


@triton.jit
def attend_keys(
    q, position, start, stop, kv_head, cache, ints, table_at, path_at, path_start, num_path,
    scale, softcap, window, block_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PATHS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Queries [BLOCK_M, BLOCK_D] at their positions over the keys from start to stop: the largest score times log2(e),
    the sum of exp2(score - largest), and the sum of that times the values."""
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < DIM
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        exists = keys < stop
        block = tl.load(ints + table_at + keys // BLOCK_SIZE, mask=exists, other=0)
        offset = keys % BLOCK_SIZE
        if PATHS:
            on_path = exists & (keys >= path_start) & (keys < path_start + num_path)
            slot = tl.load(ints + path_at + keys - path_start, mask=on_path, other=0)
            block = tl.where(on_path, slot // BLOCK_SIZE, block)
            offset = tl.where(on_path, slot % BLOCK_SIZE, offset)
        at = block.to(tl.int64) * block_stride + (kv_head * BLOCK_SIZE + offset) * DIM
        k = tl.load(cache + at[None, :] + dims[:, None], mask=exists[None, :] & in_dim[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # tanh
        seen = exists[None, :] & (keys[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))  # log2(e), for exp2
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.math.exp2(scores - finite[:, None])
        shrink = tl.math.exp2(largest - finite)
        total = total * shrink + tl.sum(weights, 1)
        v_at = cache + at[:, None] + BLOCK_SIZE * KV_HEADS * DIM + dims[None, :]
        v = tl.load(v_at, mask=exists[:, None] & in_dim[None, :], other=0.0)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        largest = new_largest
    return largest, total, acc


# A step's numbers lie at any address: code must not depend on which.
@triton.jit(do_not_specialize=["rows", "splits"], do_not_specialize_on_alignment=["tiles", "ints"])
def _attend(
    query, cache, out, partial, stats, tiles, ints, scale, softcap, window, rows, splits,
    q_stride, block_stride,
    FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PATHS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    record = tiles + tile * FIELDS
    rows_at, num_rows, first_position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    table_at, path_at = tl.load(record + 3), tl.load(record + 4)
    path_start, num_path = tl.load(record + 5), tl.load(record + 6)

    num_keys = first_position + num_rows
    first_seen = 0
    if WINDOWED:
        first_seen = tl.maximum(first_position + 1 - window, 0) // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(num_keys - first_seen, splits), BLOCK_N) * BLOCK_N
    start = first_seen + split * span
    stop = tl.minimum(start + span, num_keys)
    if num_rows == 0 or start >= stop:
        return

    m = tl.arange(0, BLOCK_M)
    row = m // GROUP  # of the tile
    used = row < num_rows
    token = tl.load(ints + rows_at + row, mask=used, other=0).to(tl.int64)
    heads = kv_head * GROUP + m % GROUP
    position = first_position + row
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < DIM
    q_at = query + token[:, None] * q_stride + heads[:, None] * DIM + dims[None, :]
    q = tl.load(q_at, mask=used[:, None] & in_dim[None, :], other=0.0)

    largest, total, acc = attend_keys(
        q, position, start, stop, kv_head, cache, ints, table_at, path_at, path_start, num_path,
        scale, softcap, window, block_stride,
        KV_HEADS, DIM, BLOCK_SIZE, CAPPED, WINDOWED, PATHS, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    if not SPLIT:
        out_at = out + (token[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * DIM + dims[None, :]
        tl.store(out_at, (acc / total[:, None]).to(q.dtype), mask=used[:, None] & in_dim[None, :])
    else:
        part = ((tile * splits + split) * KV_HEADS + kv_head).to(tl.int64) * (rows * GROUP) + m
        tl.store(partial + part[:, None] * DIM + dims[None, :], acc, mask=used[:, None] & in_dim[None, :])
        tl.store(stats + 2 * part, largest, mask=used)
        tl.store(stats + 2 * part + 1, total, mask=used)


@triton.jit(do_not_specialize=["rows", "splits"], do_not_specialize_on_alignment=["tiles", "ints"])
def _join(
    out, partial, stats, tiles, ints, window, rows, splits,
    FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    record = tiles + tile * FIELDS
    rows_at, num_rows, first_position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    if row >= num_rows:
        return
    num_keys = first_position + num_rows
    first_seen = 0
    if WINDOWED:
        first_seen = tl.maximum(first_position + 1 - window, 0) // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(num_keys - first_seen, splits), BLOCK_N) * BLOCK_N
    split = tl.arange(0, WIDTH)
    filled = (split < splits) & (first_seen + split * span < num_keys)
    part = (tile * splits + split).to(tl.int64) * KV_HEADS + head // GROUP
    part = part * (rows * GROUP) + row * GROUP + head % GROUP
    dims = tl.arange(0, BLOCK_D)
    made = tl.load(
        partial + part[:, None] * DIM + dims[None, :], mask=filled[:, None] & (dims < DIM)[None, :], other=0.0
    )
    largest = tl.load(stats + 2 * part, mask=filled, other=float("-inf"))
    total = tl.load(stats + 2 * part + 1, mask=filled, other=0.0)
    token = tl.load(ints + rows_at + row).to(tl.int64)
    share = tl.math.exp2(largest - tl.max(largest, 0))
    joined = tl.sum(made * share[:, None], 0) / tl.sum(total * share, 0)
    at = out + (token * (KV_HEADS * GROUP) + head) * DIM + dims
    tl.store(at, joined.to(out.dtype.element_ty), mask=dims < DIM)


@dataclass(frozen=True, slots=True)
class Tables:
    """A step's layout on the device.

    Attributes:
        slots: [T] int32, -1 for rows that are padding.
        tiles: [N, TILE_FIELDS] int32; a tile without rows is padding.
        ints: int32, what the tiles point to.
        rows: most rows of a tile.
        splits: parts of a tile's keys.
        paths: whether a tile has a path's slots.
    """

    slots: Tensor
    tiles: Tensor
    ints: Tensor
    rows: int
    splits: int
    paths: bool


class TritonAttention(ReferenceAttention):
    """The twin of `ReferenceAttention`. Heads of queries and keys may have any even size; products are of the queries'
    dtype.
    """

    row_tile = GPU_ROW_TILE
    title = "Triton"
    heads_outermost = True

    def __init__(self, spec: AttentionSpec, pool: Tensor, dtype: torch.dtype, alone: bool = False) -> None:
        super().__init__(spec, pool, dtype, alone)
        self._num_processors = _num_processors(pool.device)
        # the kernel of chunks adds up in another order than that of single rows, and multiplies float32 slowly
        self._takes_chunks = not spec.invariant and dtype.itemsize == 2
        self._filling = filling_rows(spec, self._num_processors)
        if self._takes_chunks:
            rows = max(LONG_CHUNK, self._filling)
            self.title = f"Triton; prompts in tiles of {TILE_M} where a step has {rows} rows of them or more"

    def begin(self, layout: StepLayout) -> None:
        chunks: list[Chunk] = []
        if self._takes_chunks:
            chunks, others = split_chunks(layout.tiles, LONG_CHUNK, self._filling)
            layout = StepLayout(layout.slots, others)
        num_rows, num_tiles = len(layout.slots), len(layout.tiles)
        numbers = upload(pack_layout(layout), torch.int32, self.cache.device)
        tiles_at, ints_at = num_rows, num_rows + num_tiles * TILE_FIELDS
        self.use(
            self.tables(
                numbers[:tiles_at],
                numbers[tiles_at:ints_at].view(num_tiles, TILE_FIELDS),
                numbers[ints_at:],
                max((len(tile.rows) for tile in layout.tiles), default=0),
                max((tile.num_keys for tile in layout.tiles), default=0),
                paths=any(tile.path_slots for tile in layout.tiles),
            ),
            place_chunks(chunks, self.spec, self.cache.device) if chunks else None,
        )

    def begin_slots(self, batch: SlotBatch, blocks: BlockTables, into: SlotLayout | None = None) -> SlotRows:
        """into: where to write the layout; None: to new memory."""
        if into is None:
            into = SlotLayout.empty(batch.num_rows, batch.num_slots, self.cache.device)
        lay_out_slots(batch, blocks, self.shape.block_size, into)
        self.use(self.slot_tables(into, blocks, batch.width))
        return into.rows

    def slot_tables(self, layout: SlotLayout, blocks: BlockTables, width: int, *, paths: bool = False) -> Tables:
        """Of tiles whose ints are the blocks'."""
        num_keys = blocks.num_blocks * self.shape.block_size
        return self.tables(layout.places, layout.tiles, blocks.ints, width, num_keys, paths=paths)

    def tables(self, slots: Tensor, tiles: Tensor, ints: Tensor, rows: int, num_keys: int, *, paths: bool) -> Tables:
        """num_keys: the most that a tile may have."""
        wanted = PROGRAMS_A_PROCESSOR * self._num_processors // max(1, tiles.shape[0] * self.shape.num_kv_heads)
        return Tables(slots, tiles, ints, rows, max(1, min(JOIN_WIDTHS[-1], wanted, num_keys // LEAST_KEYS)), paths)

    def use(self, tables: Tables, chunks: ChunkTables | None = None) -> None:
        """The tables of the step whose layers are attended next, as `begin` makes them.

        chunks: rows that no tile of the tables has.
        """
        self._tables, self._chunks = tables, chunks

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        self.write(layer, inputs)
        tables, product = self._tables, inputs.product
        out = product.new_empty(product.shape[0], self.spec.num_heads, self.shape.head_dim)
        if out.shape[0] > tables.slots.shape[0]:
            out[tables.slots.shape[0] :] = 0
        if self._chunks is not None:
            attend_chunks(self.spec, layer, product, self.cache[:, layer], out, self._chunks)
        if tables.tiles.shape[0]:
            self.launch(layer, product, out)
        return out

    def launch(self, layer: int, product: Tensor, out: Tensor) -> None:
        """Attend from the queries of `product` to what is written, into out [T, heads, D]; there are tiles."""
        tables, shape, num_heads = self._tables, self.shape, self.spec.num_heads
        kv_heads, dim = shape.num_kv_heads, shape.head_dim
        num_tiles, splits, group = tables.tiles.shape[0], tables.splits, num_heads // kv_heads
        partial = stats = out  # unused
        if splits > 1:
            parts = num_tiles * splits * kv_heads * tables.rows * group
            partial = out.new_empty(parts * dim, dtype=torch.float32)
            stats = out.new_empty(parts * 2, dtype=torch.float32)
        window = self.spec.window(layer)
        cache = self.cache[:, layer]
        block_m = max(16, triton.next_power_of_2(tables.rows * group))
        block_d = max(16, triton.next_power_of_2(dim))
        programs = num_tiles * kv_heads / self._num_processors
        block_n, num_warps, num_stages = _tuning(out.dtype, block_m, block_d, programs)
        _attend[num_tiles, kv_heads, splits](
            product, cache, out, partial, stats, tables.tiles, tables.ints,
            self.spec.scale, self.spec.softcap or 0.0, window or 0, tables.rows, splits,
            product.stride(0), cache.stride(0),
            FIELDS=TILE_FIELDS, KV_HEADS=kv_heads, GROUP=group, DIM=dim, BLOCK_SIZE=shape.block_size,
            SPLIT=splits > 1, CAPPED=self.spec.softcap is not None, WINDOWED=window is not None,
            PATHS=tables.paths, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        if splits > 1:
            _join[num_tiles, tables.rows, num_heads](
                out, partial, stats, tables.tiles, tables.ints, window or 0, tables.rows, splits,
                FIELDS=TILE_FIELDS, KV_HEADS=kv_heads, GROUP=group, DIM=dim,
                WIDTH=next(width for width in JOIN_WIDTHS if width >= splits),
                WINDOWED=window is not None, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=1,
            )  # fmt: skip

    def write(self, layer: int, inputs: AttentionInputs) -> None:
        rope = inputs.rope or Rope(*inputs.product.new_empty(2, 0, 0))  # nothing is rotated
        rope_qk(
            inputs.product, rope.cos, rope.sin, inputs.num_heads, inputs.num_kv_heads, rope.q_norm, rope.k_norm,
            rope.eps, (self.cache[:, layer], self._tables.slots),
        )  # fmt: skip


def pack_layout(layout: StepLayout) -> array[int]:
    """A layout as int32 numbers: slots, tiles, and what these point to."""
    ints, records = flatten_tiles(layout.tiles, "i")
    packed = array("i", layout.slots.tolist())
    packed.extend(records)
    packed.extend(ints)
    return packed


def _tuning(dtype: torch.dtype, block_m: int, block_d: int, programs: float) -> tuple[int, int, int]:
    """Keys a step of the loop, warps, and stages of its loads; of 16 bits as measured on an H200, heads of 128, 1 to
    256 requests of 1 to 16 rows: those of one row and four in whole steps, the others alone. programs: a processor's,
    before keys are split."""
    if block_m * block_d >= 128 * 128 or block_d > 128:
        return (64 if dtype.itemsize == 2 else 32), 8, 2
    if dtype.itemsize == 4:
        return 32, 4, 2
    if block_m > 32:
        return 32, 4, 5
    if block_m == 32:
        return 64, 2, 3
    return (128, 4, 3) if programs < FEW_PROGRAMS else (64, 4, 3)


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
