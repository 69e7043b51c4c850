"""Triton's attention with bit-exact rows: a row's result does not depend on the other rows of a step, on how many of
its own request there are, nor on where its keys lie.

Keys are cut into parts of PART, counted from position 0. A part is attended as a whole by one program, and parts are
joined in order, one after another: by the program that computed them all, or by a second kernel where programs shared
them. Every tile is as large as the largest, so that all rows go through the same code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.attention.interface import GPU_ROW_TILE
from forerun.attention.layout import TILE_FIELDS
from forerun.attention.triton import Tables, TritonAttention, attend_keys

PROGRAMS_A_PROCESSOR = 3  # wanted of a launch
PART = 256  # keys
PARTIAL_BYTES = 64 << 20  # most that is written for a second kernel


@triton.jit
def _join_part(largest, total, acc, next_largest, next_total, next_acc):
    """What `attend_keys` made of some keys, [M], [M] and [M, D], with the next ones. Rounds alike in either kernel."""
    both = tl.maximum(largest, next_largest)
    finite = tl.where(both == float("-inf"), 0.0, both)
    kept, share = tl.math.exp2(largest - finite), tl.math.exp2(next_largest - finite)
    total = tl.fma(next_total, share, total * kept)
    acc = tl.fma(next_acc, tl.broadcast_to(share[:, None], acc.shape), acc * kept[:, None])
    return both, total, acc


@triton.jit
def _parts_seen(first_position, num_rows, window, WINDOWED: tl.constexpr, PART: tl.constexpr):
    """The first part that a tile sees, and the one after the last."""
    first = 0
    if WINDOWED:
        first = tl.maximum(first_position + 1 - window, 0) // PART
    return first, tl.cdiv(first_position + num_rows, PART)


@triton.jit(do_not_specialize=["rows", "splits", "parts"], do_not_specialize_on_alignment=["tiles", "ints"])
def _attend_parts(
    query, cache, out, partial, stats, tiles, ints, scale, softcap, window, rows, splits, parts,
    q_stride, block_stride,
    FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PATHS: tl.constexpr, PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    record = tiles + tile * FIELDS
    rows_at, num_rows, first_position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    table_at, path_at = tl.load(record + 3), tl.load(record + 4)
    path_start, num_path = tl.load(record + 5), tl.load(record + 6)
    first_part, last_part = _parts_seen(first_position, num_rows, window, WINDOWED, PART)
    whole = (splits == 1) | (last_part - first_part == 1)  # one program does it all
    if (num_rows == 0) | (first_part + split >= last_part):
        return

    m = tl.arange(0, BLOCK_M)
    row = m // GROUP  # of the tile
    used = row < num_rows
    token = tl.load(ints + rows_at + row, mask=used, other=0).to(tl.int64)
    heads = kv_head * GROUP + m % GROUP
    position = first_position + tl.minimum(row, num_rows - 1)  # unused rows see what the last one sees
    dims = tl.arange(0, BLOCK_D)
    stored = used[:, None] & (dims < DIM)[None, :]
    q = tl.load(query + token[:, None] * q_stride + heads[:, None] * DIM + dims[None, :], mask=stored, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in range(first_part + split, last_part, splits):
        start = part * PART
        if WINDOWED:
            start = tl.maximum(start, tl.maximum(first_position + 1 - window, 0) // BLOCK_N * BLOCK_N)
        stop = tl.minimum(part * PART + PART, first_position + num_rows)
        part_largest, part_total, part_acc = attend_keys(
            q, position, start, stop, kv_head, cache, ints, table_at, path_at, path_start, num_path,
            scale, softcap, window, block_stride,
            KV_HEADS, DIM, BLOCK_SIZE, CAPPED, WINDOWED, PATHS, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if whole:
            largest, total, acc = _join_part(largest, total, acc, part_largest, part_total, part_acc)
        else:
            place = ((tile * parts + part) * KV_HEADS + kv_head).to(tl.int64) * (rows * GROUP) + m
            tl.store(partial + place[:, None] * DIM + dims[None, :], part_acc, mask=stored)
            tl.store(stats + 2 * place, part_largest, mask=used)
            tl.store(stats + 2 * place + 1, part_total, mask=used)
    if whole:
        out_at = out + (token[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * DIM + dims[None, :]
        tl.store(out_at, (acc / total[:, None]).to(q.dtype), mask=stored)


@triton.jit(do_not_specialize=["rows", "parts"], do_not_specialize_on_alignment=["tiles", "ints"])
def _join_parts(
    out, partial, stats, tiles, ints, window, rows, parts,
    FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    WINDOWED: tl.constexpr, PART: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    record = tiles + tile * FIELDS
    rows_at, num_rows, first_position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    first_part, last_part = _parts_seen(first_position, num_rows, window, WINDOWED, PART)
    if (row >= num_rows) | (last_part - first_part == 1):
        return
    one = tl.arange(0, 1)
    dims = tl.arange(0, BLOCK_D)[None, :]
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for part in tl.range(first_part, last_part, num_stages=STAGES):
        place = ((tile * parts + part) * KV_HEADS + head // GROUP).to(tl.int64) * (rows * GROUP)
        place += row * GROUP + head % GROUP + one
        made = tl.load(partial + place[:, None] * DIM + dims, mask=dims < DIM, other=0.0)
        largest, total, acc = _join_part(
            largest, total, acc, tl.load(stats + 2 * place), tl.load(stats + 2 * place + 1), made
        )
    token = tl.load(ints + rows_at + row).to(tl.int64)
    at = out + (token * (KV_HEADS * GROUP) + head) * DIM + dims
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=dims < DIM)


@dataclass(frozen=True, slots=True)
class PartTables(Tables):
    """splits: programs that share a tile's parts; parts: the most that a tile may have."""

    parts: int


class InvariantAttention(TritonAttention):
    """`TritonAttention` for `AttentionSpec.invariant`."""

    title = "Triton, each row in one order"

    def tables(
        self, slots: Tensor, tiles: Tensor, ints: Tensor, rows: int, num_keys: int, *, paths: bool
    ) -> PartTables:
        parts = max(1, triton.cdiv(num_keys, PART))
        num_tiles = max(1, tiles.shape[0])
        wanted = PROGRAMS_A_PROCESSOR * self._num_processors // (num_tiles * self.shape.num_kv_heads)
        splits = max(1, min(parts, wanted))
        if num_tiles * parts * rows * self.spec.num_heads * self.shape.head_dim * 4 > PARTIAL_BYTES:
            splits = 1
        return PartTables(slots, tiles, ints, rows, splits, paths, parts)

    def launch(self, layer: int, product: Tensor, out: Tensor) -> None:
        tables, shape, num_heads = self._tables, self.shape, self.spec.num_heads
        assert isinstance(tables, PartTables)
        kv_heads, dim, group = shape.num_kv_heads, shape.head_dim, num_heads // shape.num_kv_heads
        num_tiles, joined = tables.tiles.shape[0], tables.splits > 1
        partial = stats = out  # unused
        if joined:
            places = num_tiles * tables.parts * tables.rows * num_heads
            partial = out.new_empty(places * dim, dtype=torch.float32)
            stats = out.new_empty(places * 2, dtype=torch.float32)
        window, cache = self.spec.window(layer), self.cache[:, layer]
        block_m = max(16, triton.next_power_of_2(GPU_ROW_TILE * group))
        block_d = max(16, triton.next_power_of_2(dim))
        block_n, num_warps, num_stages = _tuning(out.dtype, block_m, block_d)
        same = {"FIELDS": TILE_FIELDS, "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "PART": PART,
                "WINDOWED": window is not None, "BLOCK_D": block_d}  # fmt: skip
        _attend_parts[num_tiles, kv_heads, tables.splits](
            product, cache, out, partial, stats, tables.tiles, tables.ints,
            self.spec.scale, self.spec.softcap or 0.0, window or 0, tables.rows, tables.splits, tables.parts,
            product.stride(0), cache.stride(0),
            BLOCK_SIZE=shape.block_size, CAPPED=self.spec.softcap is not None, PATHS=tables.paths,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, num_stages=num_stages, **same,
        )  # fmt: skip
        if joined:
            _join_parts[num_tiles, tables.rows, num_heads](
                out, partial, stats, tables.tiles, tables.ints, window or 0, tables.rows, tables.parts,
                STAGES=4, num_warps=1, **same,
            )  # fmt: skip


def _tuning(dtype: torch.dtype, block_m: int, block_d: int) -> tuple[int, int, int]:
    """Keys a step of the loop, warps, and stages of its loads: by the model alone."""
    if block_m * block_d >= 128 * 128 or block_d > 128:
        return (64 if dtype.itemsize == 2 else 32), 8, 2
    return 32, 4, 2 if dtype.itemsize == 4 else 5
