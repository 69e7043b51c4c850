"""Products on a GPU whose rows are bit-exact: a row's result does not depend on which rows share the call, nor on how
many they are. cuBLAS chooses other ways of adding up for other numbers of rows.

The sum over K is cut into parts by the weight's shape alone. A part is added up by one program, in order, 16 (float32:
1) values at a time; parts are added in order. Which program computes a part, beside how many rows and columns, changes
no bit: few rows are computed by many programs, a part each, and many rows by programs that take one part after another.
Weights are the matrix unit's first operand, so that a tile of few rows is its second, which may be as narrow as they.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256  # enough to read weights at the memory's speed
LEAST_PART = 512  # of K
MOST_PARTS = 8
PART_MULTIPLE = 128  # of every tile's depth
GROUP = 8  # tiles of rows that follow one another on the same weights
JOIN_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: rows of x times columns of the output, `depth` of K at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


# Of 16 bits, by number of rows; of ten, the fastest on an H200 with the weights of an 8B model.
TILES = (Tile(16, 64, 128, 4, 5), Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 8, 4))
WIDE_TILE = Tile(16, 64, 32, 4, 2)  # float32


@triton.jit
def _add_up(
    weight_at, x_at, part, rows_exist,
    K: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, ROWS] float32, over a part of K."""
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    start = part * PART
    for first in range(start, tl.minimum(start + PART, K), DEPTH):
        k = first + tl.arange(0, DEPTH)
        if K % DEPTH == 0:
            weights = tl.load(weight_at + k[None, :])
            values = tl.load(x_at + k[:, None], mask=rows_exist[None, :], other=0.0)
        else:
            weights = tl.load(weight_at + k[None, :], mask=(k < K)[None, :], other=0.0)
            values = tl.load(x_at + k[:, None], mask=rows_exist[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(weights, values, total, input_precision="ieee")
    return total


@triton.jit
def _finished(total, columns, in_columns, residual_at, mask, bias, scale, BIASED: tl.constexpr, ADDED: tl.constexpr):
    """What is stored: columns' bias and the residual added."""
    if BIASED:
        total += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)
    if ADDED:
        total = tl.fma(total, scale, tl.load(residual_at, mask=mask, other=0.0).to(tl.float32))
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, bias, residual, out, partial, num_rows, scale,
    N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(num_rows, ROWS)
    in_group: tl.constexpr = GROUP * ((N + COLUMNS - 1) // COLUMNS)
    first_tile = program // in_group * GROUP
    group = tl.minimum(row_tiles - first_tile, GROUP)
    rows = (first_tile + program % in_group % group) * ROWS + tl.arange(0, ROWS)
    columns = program % in_group // group * COLUMNS + tl.arange(0, COLUMNS)
    rows_exist, in_columns = rows < num_rows, columns < N
    x_at = x + rows.to(tl.int64)[None, :] * K
    weight_at = weight + tl.where(in_columns, columns, 0).to(tl.int64)[:, None] * K  # what is past the end is dropped
    if SPLIT or PARTS == 1:
        total = _add_up(weight_at, x_at, split, rows_exist, K, PART, ROWS, COLUMNS, DEPTH)
    else:
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for part in range(PARTS):
            total += _add_up(weight_at, x_at, part, rows_exist, K, PART, ROWS, COLUMNS, DEPTH)
    at = rows.to(tl.int64)[None, :] * N + columns[:, None]
    mask = rows_exist[None, :] & in_columns[:, None]
    if SPLIT:
        tl.store(partial + split * num_rows.to(tl.int64) * N + at, total, mask=mask)
    else:
        total = _finished(total, columns[:, None], in_columns[:, None], residual + at, mask, bias, scale, BIASED, ADDED)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _join(
    partial, bias, residual, out, num_rows, scale,
    N: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    at = row * N + columns
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial + part * num_rows.to(tl.int64) * N + at, mask=mask, other=0.0)
    total = _finished(total, columns, mask, residual + at, mask, bias, scale, BIASED, ADDED)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def parts_of(num_columns: int, depth: int) -> tuple[int, int]:
    """How the sum over K = `depth` of a weight [N, K] is cut: number of parts, and the length of all but the last."""
    parts = 1
    while 2 * parts <= MOST_PARTS and depth >= 2 * parts * LEAST_PART and num_columns * 2 * parts <= 64 * PROGRAMS:
        parts *= 2
    length = triton.cdiv(triton.cdiv(depth, parts), PART_MULTIPLE) * PART_MULTIPLE
    return triton.cdiv(depth, length), length


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    tile: Tile | None = None,
) -> Tensor:
    """x W^T + bias, or residual + scale * (x W^T + bias), which is written over the residual. Sums are float32.

    Args:
        x: [T, K]. weight: [N, K], contiguous. bias: [N]. residual: [T, N], contiguous. All of one dtype.
        tile: for measurements; no bit depends on it.
    Returns:
        [T, N]: the residual where there is one.
    """
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    assert weight.is_contiguous()
    assert residual is None or residual.is_contiguous()
    out = x.new_empty(num_rows, num_columns) if residual is None else residual
    if num_rows == 0:
        return out
    x = x.contiguous()
    if x.data_ptr() % 16:  # code is of one kind
        x = x.clone()
    tile = tile or tile_for(num_rows, x.dtype)
    assert PART_MULTIPLE % tile.depth == 0, "no step may reach beyond a part"
    parts, length = parts_of(num_columns, depth)
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    split = parts > 1 and tiles < PROGRAMS
    partial = x.new_empty(parts * out.numel(), dtype=torch.float32) if split else out
    ends = {"N": num_columns, "PARTS": parts, "BIASED": bias is not None, "ADDED": residual is not None}
    bias = out if bias is None else bias
    _product[tiles, parts if split else 1](
        x, weight, bias, out, out, partial, num_rows, scale,
        K=depth, PART=length, SPLIT=split, **ends,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=GROUP,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if split:
        grid = (num_rows, triton.cdiv(num_columns, JOIN_COLUMNS))
        _join[grid](partial, bias, out, out, num_rows, scale, **ends, BLOCK=JOIN_COLUMNS, num_warps=4)
    return out


def tile_for(num_rows: int, dtype: torch.dtype) -> Tile:
    """The least that takes all rows, or the largest."""
    if dtype.itemsize == 4:
        return WIDE_TILE
    return next((tile for tile in TILES if tile.rows >= num_rows), TILES[-1])


def is_row_exact(weight: Tensor) -> bool:
    """Whether this GPU keeps what tiles of several sizes are taken for: that its matrix unit adds up a row alike in all
    of them."""
    generator = torch.Generator(weight.device).manual_seed(0)
    num_rows = TILES[-1].rows + 1
    x = torch.randn(num_rows, weight.shape[1], device=weight.device, generator=generator).to(weight.dtype)
    whole = linear(x, weight)
    counts = [1, *(tile.rows for tile in TILES)]
    return all(torch.equal(linear(x[-count:], weight), whole[-count:]) for count in counts)
