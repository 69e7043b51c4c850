"""Attention of long chunks of prompts on a GPU: the maths of `triton.py` in tiles that fill the tensor cores.

There a tile is what a request decodes, and reading keys takes the time. Here products do: a tile has TILE_M rows, query
heads that share a head of keys times tokens, and keys that all of them see are added without a mask.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.attention.interface import AttentionSpec
from forerun.attention.layout import Chunk
from forerun.kernels.uploads import upload

TILE_M = 128  # of a product
FIELDS = 4  # of a tile's record
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_keys(
    acc, total, largest, q, cache, table, first, stop, position, scale, softcap, window, block_stride, kv_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state of the rows with BLOCK_N keys more; without MASKED each row sees all of them."""
    keys = first + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    if MASKED:
        exists = keys < stop
        block = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0)
    else:
        block = tl.load(table + keys // BLOCK_SIZE)
    at = block.to(tl.int64) * block_stride + (kv_head * BLOCK_SIZE + keys % BLOCK_SIZE) * DIM
    k_at = cache + at[None, :] + dims[:, None]
    v_at = cache + at[:, None] + BLOCK_SIZE * KV_HEADS * DIM + dims[None, :]
    if MASKED:
        k = tl.load(k_at, mask=exists[None, :] & (dims < DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=exists[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM < BLOCK_D:
        k = tl.load(k_at, mask=(dims < DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dims < DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if CAPPED:
        scores = softcap * (1 - 2 / (tl.exp(2 * scale * scores / softcap) + 1)) * LOG2_E  # tanh; for exp2
    else:
        scores = scores * (scale * LOG2_E)
    if MASKED:
        seen = exists[None, :] & (keys[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    finite = new_largest
    if WINDOWED:  # a row may have seen none yet
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.math.exp2(scores - finite[:, None])
    shrink = tl.math.exp2(largest - finite)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_largest


# A step's numbers lie at any address: code must not depend on which.
@triton.jit(do_not_specialize_on_alignment=["records", "ints"])
def _attend_chunks(
    query, cache, out, records, ints, scale, softcap, window, q_stride, block_stride,
    FIELDS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    record = records + tl.program_id(1) * FIELDS
    first_row, num_rows, first_position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    table = ints + tl.load(record + 3)

    m = tl.arange(0, BLOCK_M)
    row = m // GROUP  # of the tile
    used = row < num_rows
    token = (first_row + row).to(tl.int64)
    heads = kv_head * GROUP + m % GROUP
    position = first_position + tl.minimum(row, num_rows - 1)  # so that rows not used see something too
    dims = tl.arange(0, BLOCK_D)
    there = used[:, None] & (dims < DIM)[None, :]
    q = tl.load(query + token[:, None] * q_stride + heads[:, None] * DIM + dims[None, :], mask=there, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stop = first_position + num_rows
    masked_from = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        masked_from = tl.maximum(first_position + 1 - window, 0) // BLOCK_N * BLOCK_N
    else:
        for first in range(0, masked_from, BLOCK_N):
            acc, total, largest = _add_keys(
                acc, total, largest, q, cache, table, first, stop, position, scale, softcap, window, block_stride,
                kv_head, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, CAPPED, WINDOWED, False,
            )  # fmt: skip
    for first in range(masked_from, stop, BLOCK_N):
        acc, total, largest = _add_keys(
            acc, total, largest, q, cache, table, first, stop, position, scale, softcap, window, block_stride,
            kv_head, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, CAPPED, WINDOWED, True,
        )  # fmt: skip
    out_at = out + (token[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * DIM + dims[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """The long chunks of a step on the device.

    Attributes:
        records: [N, FIELDS] int32, of each tile: first row of the step, number of rows, first position, where the
            blocks of its request begin.
        ints: int32, blocks of the requests.
    """

    records: Tensor
    ints: Tensor


def filling_rows(spec: AttentionSpec, num_processors: int) -> int:
    """Of one chunk, that give each processor a program: from there on split keys are no faster."""
    return -(-num_processors // spec.shape.num_kv_heads) * _tile_rows(spec)


def place_chunks(chunks: Sequence[Chunk], spec: AttentionSpec, device: torch.device) -> ChunkTables:
    """Cut into tiles, those with most keys first: what runs last should be short."""
    rows = _tile_rows(spec)
    ints = array("i")
    tiles: list[tuple[int, int, int, int]] = []
    for chunk in chunks:
        for start in range(0, chunk.num_rows, rows):
            num_rows = min(rows, chunk.num_rows - start)
            tiles.append((chunk.first_row + start, num_rows, chunk.first_position + start, len(ints)))
        ints.extend(chunk.block_table)
    tiles.sort(key=lambda tile: -tile[2])
    num_numbers = len(tiles) * FIELDS
    numbers = array("i", (number for tile in tiles for number in tile))
    numbers.extend(ints)
    uploaded = upload(numbers, torch.int32, device)
    return ChunkTables(uploaded[:num_numbers].view(len(tiles), FIELDS), uploaded[num_numbers:])


def attend_chunks(
    spec: AttentionSpec, layer: int, query: Tensor, cache: Tensor, out: Tensor, tables: ChunkTables
) -> None:
    """Attend the rows of the chunks.

    Args:
        query: [T, at least num_heads * D], a row's query heads first.
        cache: [blocks, 2, block_size, kv_heads, D] of the layer, where a head's tokens in a block lie together.
        out: [T, num_heads, D]; only the chunks' rows are written.
    """
    shape, window = spec.shape, spec.window(layer)
    group = spec.num_heads // shape.num_kv_heads
    block_m = max(TILE_M, triton.next_power_of_2(group))
    block_d = max(16, triton.next_power_of_2(shape.head_dim))
    block_n, num_warps, num_stages = _tuning(max(query.dtype.itemsize, cache.dtype.itemsize), block_d)
    _attend_chunks[shape.num_kv_heads, tables.records.shape[0]](
        query, cache, out, tables.records, tables.ints,
        spec.scale, spec.softcap or 0.0, window or 0, query.stride(0), cache.stride(0),
        FIELDS=FIELDS, KV_HEADS=shape.num_kv_heads, GROUP=group, DIM=shape.head_dim, BLOCK_SIZE=shape.block_size,
        CAPPED=spec.softcap is not None, WINDOWED=window is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def _tile_rows(spec: AttentionSpec) -> int:
    return max(1, TILE_M // (spec.num_heads // spec.shape.num_kv_heads))


def _tuning(element_bytes: int, block_d: int) -> tuple[int, int, int]:
    """Keys a step of the loop, warps, and steps whose loads are under way at once; the best of eight on an H200."""
    if element_bytes > 2:
        return 32, 8, 2
    return (64, 4, 3) if block_d <= 128 else (64, 8, 2)
