"""Triton's attention against the reference backend on the same device: decoding, verification, trees, chunks."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence

import pytest
import torch

from forerun.attention import AttentionBackend, AttentionInputs, AttentionSpec, KVShape, Rope, Segment, lay_out
from forerun.attention.reference import ReferenceAttention

pytest.importorskip("triton")
from forerun.attention.triton import LONG_CHUNK, TritonAttention

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # sums of a few hundred, then rounding
if os.environ.get("TRITON_INTERPRET") == "1":
    del TOLERANCES[torch.bfloat16]  # the interpreter multiplies its bits
TREE = (-1, -1, 0, 0, 1, 2, 4, 3)
SPECS = {
    "qwen3": AttentionSpec(KVShape(2, 2, 128), 8, 128**-0.5),
    "heads_of_their_own": AttentionSpec(KVShape(2, 4, 64), 4, 0.2),
    "odd_group": AttentionSpec(KVShape(2, 2, 64), 14, 0.125),
    "odd_dim": AttentionSpec(KVShape(2, 2, 24, 4), 4, 24**-0.5),
    "capped": AttentionSpec(KVShape(2, 1, 256), 4, 0.7, softcap=2.0),
    "window": AttentionSpec(KVShape(2, 2, 64), 4, 0.125, None, (None, 40)),
    "capped_window": AttentionSpec(KVShape(2, 2, 16, 8), 6, 0.25, 1.5, (None, 7)),
}


def twins(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> list[AttentionBackend]:
    num_bytes = 400 * spec.shape.block_bytes(dtype.itemsize)
    return [
        backend(spec, torch.zeros(num_bytes, dtype=torch.uint8, device=device), dtype)
        for backend in (ReferenceAttention, TritonAttention)
    ]


def attend_all(
    backends: Sequence[AttentionBackend], segments: Sequence[Segment], dtype: torch.dtype, device: torch.device
) -> None:
    """One step on both, and what comes out of both layers is the same."""
    spec = backends[0].spec  # type: ignore[attr-defined]
    shape = spec.shape
    num_rows = sum(len(segment.token_ids) for segment in segments)
    width = (spec.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    product = torch.randn(num_rows + 3, width).to(device, dtype)
    rope = random_rope(num_rows + 3, shape.head_dim, dtype, device)
    for backend in backends:
        backend.begin(lay_out(segments, block_size=shape.block_size, row_tile=backend.row_tile))
    for layer in range(2):
        expected, got = (
            backend.attend(layer, AttentionInputs(product.clone(), spec.num_heads, shape.num_kv_heads, rope))
            for backend in backends
        )
        assert not got[num_rows:].any(), "padding"
        worst = TOLERANCES[dtype] * float(product.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=worst)


def random_rope(num_rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Rope:
    angles = torch.rand(num_rows, dim // 4, device=device)
    norms = torch.rand(2, dim, device=device).to(dtype) + 0.5
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype), norms[0], norms[1], 1e-6)


def blocks_for(num_tokens: int, block_size: int, free: list[int]) -> list[int]:
    return [free.pop() for _ in range(-(-num_tokens // block_size))]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Prompts in chunks, then single rows, chains and trees of many requests in one step, beside another's prompt."""
    torch.manual_seed(0)
    spec = SPECS[name]
    size = spec.shape.block_size
    backends = twins(spec, dtype, device)
    free = list(range(400))
    random.Random(1).shuffle(free)
    lengths = (1, 5, 16, 63, 64, 65, 130, 300)
    tables = [blocks_for(length + 40, size, free) for length in lengths]
    for first in range(0, 300, 150):
        parts = [(max(0, min(150, length - first)), table) for length, table in zip(lengths, tables, strict=True)]
        attend_all(backends, [Segment([0] * n, first, table) for n, table in parts if n], dtype, device)
    known = list(zip(lengths, tables, strict=True))
    attend_all(backends, [Segment([0], length, table) for length, table in known], dtype, device)
    attend_all(backends, [Segment([0] * 4, length + 1, table) for length, table in known], dtype, device)
    trees = [Segment([0] * (1 + len(TREE)), length + 5, table, TREE) for length, table in known]
    attend_all(backends, trees, dtype, device)
    new = Segment([0] * 30, 0, blocks_for(30, size, free))
    attend_all(backends, [trees[6], new, Segment([0] * 2, 300 + 5, tables[7])], dtype, device)


@pytest.mark.parametrize("dtype", [dtype for dtype in TOLERANCES if dtype.itemsize == 2], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_long_chunks_equal_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Alone, after a prefix, after an earlier chunk, and beside single rows, a chain and a tree in one step."""
    torch.manual_seed(2)
    spec = SPECS[name]
    size = spec.shape.block_size
    backends = twins(spec, dtype, device)
    backends[1]._filling = 1  # type: ignore[attr-defined]  # as if the GPU were small
    free = list(range(400))
    random.Random(2).shuffle(free)
    long, other, short = (blocks_for(num_tokens, size, free) for num_tokens in (LONG_CHUNK + 260, LONG_CHUNK + 80, 60))
    steps = [
        [Segment([0] * (LONG_CHUNK + 3), 0, long)],
        [Segment([0] * 41, 0, short), Segment([0] * 37, 0, other)],
        [
            Segment([0], 41, short),
            Segment([0] * (LONG_CHUNK + 1), LONG_CHUNK + 3, long),
            Segment([0] * (LONG_CHUNK - 1), 37, other),  # just short of one
        ],
        [
            Segment([0] * (1 + len(TREE)), 42, short, TREE),
            Segment([0] * LONG_CHUNK, 37, other),  # once more, as a request that was preempted
            Segment([0] * 3, 2 * LONG_CHUNK - 1, long),
        ],
    ]
    for segments, num_chunks in zip(steps, (1, 0, 1, 1), strict=True):
        attend_all(backends, segments, dtype, device)
        chunks = backends[1]._chunks  # type: ignore[attr-defined]
        assert (chunks is not None) == bool(num_chunks)


@pytest.mark.parametrize("change", [{"invariant": True}, {}], ids=["invariant", "float32"])
def test_who_has_no_chunks(change: dict[str, bool], device: torch.device) -> None:
    """Where bits must not depend on company, and where products are of float32, there is one kernel."""
    torch.manual_seed(3)
    spec = dataclasses.replace(SPECS["qwen3"], **change)  # type: ignore[arg-type]
    dtype = torch.float16 if change else torch.float32
    backends = twins(spec, dtype, device)
    backends[1]._filling = 1  # type: ignore[attr-defined]
    attend_all(backends, [Segment([0] * (LONG_CHUNK + 2), 0, list(range(40)))], dtype, device)
    assert backends[1]._chunks is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen3", "window", "capped"])
def test_long_contexts_are_split(name: str, device: torch.device) -> None:
    torch.manual_seed(1)
    spec = SPECS[name]
    backends = twins(spec, torch.float32, device)
    table = list(range(330))
    for backend in backends:
        backend.cache.copy_(torch.randn(backend.cache.shape))  # type: ignore[attr-defined]
        torch.manual_seed(1)
    backends[1].cache.copy_(backends[0].cache)  # type: ignore[attr-defined]
    backends[1]._num_processors = 132  # type: ignore[attr-defined]  # a GPU's, in the interpreter too
    for rows in (1, 4):
        attend_all(backends, [Segment([0] * rows, 5000, table)], torch.float32, device)
        assert backends[1]._tables.splits > 8  # type: ignore[attr-defined]


def test_a_row_that_was_moved_is_found(device: torch.device) -> None:
    backends = twins(SPECS["qwen3"], torch.float32, device)
    attend_all(backends, [Segment([0] * 20, 0, [3, 7])], torch.float32, device)
    for backend in backends:
        backend.move([7 * 16 + 2], [7 * 16])
    attend_all(backends, [Segment([0], 17, [3, 7])], torch.float32, device)
