"""The small steps of a layer as Triton kernels, one launch each; their plain twins are in `kernels.reference`.

They compute in float32 and round what they store. Not for products: those are cuBLAS's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS_A_PROGRAM = 4
MAX_COLUMNS = 1024  # of `gated`, a program


@triton.jit
def _rms_norm(x, weight, out, width, x_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(values.dtype).to(tl.float32) * weights.to(tl.float32)
    tl.store(out + row * width + columns, normed.to(values.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin of `reference.rms_norm` for x [T, H] with contiguous rows."""
    num_rows, width = x.shape
    out = x.new_empty(num_rows, width)
    block = triton.next_power_of_2(width)
    num_warps = 8 if block > 2048 else 4
    _rms_norm[(num_rows,)](x, weight, out, width, x.stride(0), eps, BLOCK=block, num_warps=num_warps)
    return out


@triton.jit
def _gated(gate_up, out, width, stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = gate_up + row * stride + columns
    gate = tl.load(start, mask=inside, other=0.0)
    up = tl.load(start + width, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    z = wide
    if GELU:
        z = 1.5957691216057308 * wide * (1 + 0.044715 * (wide * wide))  # sqrt(8 / pi)
    made = wide / (1 + tl.exp(-z)) * up
    tl.store(out + row * width + columns, made.to(gate.dtype), mask=inside)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """The twin of `reference.gated` for gate_up [T, 2I] with contiguous rows."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    block = min(MAX_COLUMNS, triton.next_power_of_2(width))
    grid = (num_rows, triton.cdiv(width, block))
    gelu = activation == "gelu_tanh"
    _gated[grid](gate_up, out, width, gate_up.stride(0), GELU=gelu, BLOCK=block)
    return out


@triton.jit
def _load_head(row, head, columns, inside, scale, weight, weights_at, NORM: tl.constexpr):
    """[heads, columns] float32 of a row's heads, normed where there is a norm."""
    values = tl.load(row + head + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    if NORM:
        weights = tl.load(weight + weights_at + columns, mask=inside, other=0.0).to(tl.float32)
        wide = ((wide * scale[:, None]).to(values.dtype).to(tl.float32) * weights).to(values.dtype).to(tl.float32)
    return wide


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_qk(
    qkv, cos, sin, q_norm, k_norm, stride, eps, cache, slots, block_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, WHOLE: tl.constexpr, STORE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    Q_PROGRAMS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PROGRAMS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    program = tl.program_id(1)
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    angle = token * HALF + columns
    cosine = tl.load(cos + angle, mask=columns < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=columns < HALF, other=0.0).to(tl.float32)
    slot = tl.full((), -1, tl.int32)
    if STORE:
        slot = tl.load(slots + token)

    is_query = program < Q_PROGRAMS
    num_heads = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    weight = q_norm
    first = program * HEADS
    row = qkv + token * stride
    if not is_query:
        weight = k_norm
        first = (program - Q_PROGRAMS) * HEADS
        row += NUM_HEADS * DIM
    place = (slot // BLOCK_SIZE).to(tl.int64) * block_stride + slot % BLOCK_SIZE * DIM
    if program >= Q_PROGRAMS + KV_PROGRAMS:
        first -= KV_PROGRAMS * HEADS
        row += NUM_KV_HEADS * DIM
        place += NUM_KV_HEADS * BLOCK_SIZE * DIM
    heads = first + tl.arange(0, HEADS)[:, None]
    exists = heads < num_heads
    head = heads * DIM
    to_cache = cache + place + head * BLOCK_SIZE
    if program >= Q_PROGRAMS + KV_PROGRAMS:
        dims = tl.arange(0, BLOCK_DIM)[None, :]
        value = tl.load(row + head + dims, mask=exists & (dims < DIM), other=0.0)
        tl.store(to_cache + dims, value.to(cache.dtype.element_ty), mask=exists & (dims < DIM) & (slot >= 0))
        return

    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    in_half = exists & (columns < HALF)
    in_rest = exists & (rest < DIM)
    scale = tl.zeros([HEADS], dtype=tl.float32)
    if NORM:
        a = tl.load(row + head + columns, mask=in_half, other=0.0).to(tl.float32)
        b = tl.load(row + head + HALF + columns, mask=in_half, other=0.0).to(tl.float32)
        c = tl.load(row + head + rest, mask=in_rest, other=0.0).to(tl.float32)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        if WHOLE:
            total = tl.sum(squares, 0) / (num_heads * DIM)
            scale += tl.math.rsqrt(total + eps)
        else:
            scale += tl.math.rsqrt(squares / DIM + eps)

    weights_at = heads * (DIM if WHOLE else 0)
    first_half = _load_head(row, head, columns, in_half, scale, weight, weights_at, NORM)
    second_half = _load_head(row, head, HALF + columns, in_half, scale, weight, weights_at, NORM)
    dtype = qkv.dtype.element_ty
    low = (first_half * cosine - second_half * sine).to(dtype)
    high = (second_half * cosine + first_half * sine).to(dtype)
    kept = _load_head(row, head, rest, in_rest, scale, weight, weights_at, NORM).to(dtype)
    if is_query or not STORE:
        tl.store(row + head + columns, low, mask=in_half)
        tl.store(row + head + HALF + columns, high, mask=in_half)
        if NORM and 2 * HALF < DIM:
            tl.store(row + head + rest, kept, mask=in_rest)
    else:
        kind = cache.dtype.element_ty
        tl.store(to_cache + columns, low.to(kind), mask=in_half & (slot >= 0))
        tl.store(to_cache + HALF + columns, high.to(kind), mask=in_half & (slot >= 0))
        if 2 * HALF < DIM:
            tl.store(to_cache + rest, kept.to(kind), mask=in_rest & (slot >= 0))


def rope_qk(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    place: tuple[Tensor, Tensor] | None = None,
) -> None:
    """As `fused.rope_qk`, in one launch; rows of qkv are contiguous, and so are cos and sin. With a place keys go
    there, values with them, and in qkv only queries change.

    Args:
        place: cache [blocks, 2, block_size, kv_heads, D], where a head's tokens in a block lie together, and slots [R]
            int32 of the first R rows, block * block_size + offset. Rows below 0 leave nothing in the cache; what
            happens to their queries, and those of rows past R, does not matter.
    """
    dim, half = qkv.shape[1] // (num_heads + 2 * num_kv_heads), cos.shape[1]
    norm = q_norm is not None
    whole = q_norm is not None and q_norm.numel() != dim
    heads = triton.next_power_of_2(max(num_heads, num_kv_heads)) if whole else HEADS_A_PROGRAM
    cache, slots = place or (qkv, qkv)  # without a place only the number of rows counts
    programs = triton.cdiv(num_heads, heads) + (2 if place else 1) * triton.cdiv(num_kv_heads, heads)
    _rope_qk[slots.shape[0], programs](
        qkv, cos, sin, q_norm if norm else qkv, k_norm if norm else qkv, qkv.stride(0), eps,
        cache, slots, cache.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim, HALF=half, NORM=norm, WHOLE=whole,
        STORE=place is not None, BLOCK_SIZE=cache.shape[2] if place else 1, HEADS=heads,
        BLOCK_HALF=triton.next_power_of_2(max(1, half)), BLOCK_REST=triton.next_power_of_2(max(1, dim - 2 * half)),
        BLOCK_DIM=triton.next_power_of_2(dim), num_warps=4 if whole else 1,
    )  # fmt: skip
