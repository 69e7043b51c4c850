"""--batch-invariant on a GPU: a row's bits are its own, so texts are exactly those of plain decoding, in 16 bits too.

With TRITON_INTERPRET=1 the kernels run on a CPU, whose library of products has other bits for other tiles: there one
tile computes all. Sequences are shorter there, and so are the parts of attention.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.attention import AttentionInputs, AttentionSpec, KVShape, Rope, Segment, lay_out
from forerun.attention.reference import ReferenceAttention
from forerun.kernels import reference
from tests.engine.test_lossless import assert_same, mixed_work
from tests.methods import METHODS, DraftModels
from tests.tiny_engine import NGRAM, Result, make_engine, run, save_tiny_target

pytest.importorskip("triton")
from forerun.attention import triton_invariant
from forerun.attention.triton_invariant import InvariantAttention
from forerun.kernels import triton_product

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(96, 64), (100, 1100)] if INTERPRETED else [(96, 64), (201, 1100), (1024, 4096), (4096, 1280)]
COUNTS = [1, 2, 17, 40] if INTERPRETED else [*range(1, 71), 128, 129, 300, 1024]

LONG, TAIL = (1, 5) if INTERPRETED else (4, 18)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no usable GPU")


@pytest.fixture(autouse=True)
def _one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(triton_invariant, "PART", 64)
        monkeypatch.setattr(triton_product, "TILES", (triton_product.WIDE_TILE,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_a_product_is_the_same_in_any_company(
    columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> None:
    """However many rows there are, and at every place among them; with bias, and added to what was there."""
    torch.manual_seed(0)
    weight = (torch.randn(columns, depth, device=device) / depth**0.5).to(dtype)
    bias = torch.randn(columns, device=device).to(dtype)
    x = torch.randn(max(COUNTS), depth, device=device).to(dtype)
    before = torch.randn(max(COUNTS), columns, device=device).to(dtype)
    plain = triton_product.linear(x, weight, bias)
    added = triton_product.linear(x, weight, None, before.clone(), 0.22)
    expected = x.float() @ weight.float().T
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(plain.float(), expected + bias.float(), rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(added.float(), before.float() + 0.22 * expected, rtol=tolerance, atol=4 * tolerance)
    for count in COUNTS:
        first = random.Random(count).randint(0, len(x) - count)
        rows = slice(first, first + count)
        assert torch.equal(triton_product.linear(x[rows], weight, bias), plain[rows]), count
        assert torch.equal(triton_product.linear(x[rows], weight, None, before[rows].clone(), 0.22), added[rows]), count


def test_a_gpu_that_adds_up_otherwise_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 64, device=device)
    assert triton_product.is_row_exact(weight)
    exact = triton_product.linear
    monkeypatch.setattr(triton_product, "linear", lambda x, weight: exact(x, weight) + (len(x) > 1) * 1e-3)
    assert not triton_product.is_row_exact(weight)


def test_how_a_sum_is_cut_depends_on_the_weight_alone() -> None:
    assert triton_product.parts_of(24576, 4096) == (1, 4096)
    assert triton_product.parts_of(4096, 4096) == (4, 1024)
    for columns, depth in ((64, 64), (4096, 12288), (33, 5000), (1, 1 << 16)):
        parts, length = triton_product.parts_of(columns, depth)
        assert length % triton_product.PART_MULTIPLE == 0
        assert (parts - 1) * length < depth <= parts * length


SPECS = {
    "group": AttentionSpec(KVShape(1, 2, 128), 8, 128**-0.5, invariant=True),
    "odd": AttentionSpec(KVShape(1, 2, 24, 4), 6, 24**-0.5, invariant=True),
    "capped_window": AttentionSpec(KVShape(1, 2, 64), 4, 0.125, 1.5, (75 * LONG,), invariant=True),
    "small_window": AttentionSpec(KVShape(1, 1, 32), 2, 0.2, None, (10 * LONG,), invariant=True),
}
TREE = (-1, -1, 0, 0, 1, 2, 4, 3)


class Sequences:
    """Products of whole sequences, attended in steps; what comes out of a row must always be the same."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        shape = spec.shape
        self.width = (spec.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        half = shape.head_dim // 4
        angles = torch.arange(2000)[:, None] * torch.rand(half)
        self.cos, self.sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def new(self, length: int) -> Tensor:
        return torch.randn(length, self.width).to(self.device, self.dtype)

    def backend(self, kind: type[ReferenceAttention] = InvariantAttention) -> Any:
        shape = self.spec.shape
        num_bytes = 2200 // shape.block_size * shape.block_bytes(self.dtype.itemsize)
        memory = torch.randn(num_bytes // 4, device=self.device).view(torch.uint8)  # what is not written holds anything
        backend = kind(self.spec, memory, self.dtype)
        if kind is InvariantAttention:
            backend._num_processors = 132  # a GPU's, in the interpreter too
        return backend

    def attend(self, backend: Any, segments: Sequence[Segment], products: Sequence[Tensor]) -> Sequence[Tensor]:
        """[rows, heads, D] of each segment, whose rows are given."""
        out: Tensor = backend.attend(0, self._begin(backend, segments, products))
        return out.split([len(s.token_ids) for s in segments])

    def write(self, backend: Any, table: list[int], product: Tensor) -> None:
        """Keys and values of a sequence's first rows."""
        backend.write(0, self._begin(backend, [Segment([0] * len(product), 0, table)], [product]))

    def _begin(self, backend: Any, segments: Sequence[Segment], products: Sequence[Tensor]) -> AttentionInputs:
        shape = self.spec.shape
        backend.begin(lay_out(segments, block_size=shape.block_size, row_tile=backend.row_tile))
        positions = torch.tensor([p for s in segments for p in s.positions], device=self.device)
        rope = Rope(self.cos[positions], self.sin[positions])
        return AttentionInputs(torch.cat(list(products)), self.spec.num_heads, shape.num_kv_heads, rope)


def block_tables(lengths: Sequence[int], block_size: int, seed: int) -> list[list[int]]:
    free = list(range(2200 // block_size))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_attention_is_the_same_in_any_company(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """A row alone with its sequence, one a step; as a chain; in a chunk; beside others; elsewhere."""
    torch.manual_seed(0)
    sequences = Sequences(SPECS[name], dtype, device)
    size, length, tail = SPECS[name].shape.block_size, 150 * LONG, TAIL
    chunk, others = 44 * LONG + 1, 220 * LONG
    own, other = sequences.new(length), sequences.new(others + 5)
    (table,) = block_tables([length + 10], size, 0)

    def rest(step: int, backend: Any, start: int = length - tail) -> Tensor:
        made = []
        for first in range(start, length, step):
            rows = own[first : first + step]
            made += sequences.attend(backend, [Segment([0] * len(rows), first, table)], [rows])
        return torch.cat(made)

    backend = sequences.backend()
    sequences.write(backend, table, own[: length - tail])
    expected = rest(1, backend)
    assert backend._tables.splits > 1
    known = sequences.backend(ReferenceAttention)
    sequences.write(known, table, own[: length - tail])
    torch.testing.assert_close(expected, rest(1, known), rtol=0, atol=5 * TOLERANCES[dtype])
    for step in (tail // 4 + 1, tail - 2, tail):
        assert torch.equal(rest(step, backend), expected), f"{step} rows a step"
    chunked = sequences.backend()
    sequences.write(chunked, table, own[: length - chunk])
    assert torch.equal(rest(chunk, chunked, start=length - chunk)[-tail:], expected), "in a chunk"

    tables = block_tables([length + 10, others + 10, 100], size, 1)
    crowded = sequences.backend()
    sequences.write(crowded, tables[1], other[:others])
    sequences.write(crowded, tables[0], own[: length - tail])
    for first, step in ((length - tail, 3), (length - tail + 3, tail - 3)):
        _, made, _ = sequences.attend(
            crowded,
            [Segment([0] * 5, others, tables[1]), Segment([0] * step, first, tables[0]), Segment([0], 0, tables[2])],
            [other[others:], own[first : first + step], other[:1]],
        )
        assert torch.equal(made, expected[first + tail - length :][:step]), "in company"
    backend._num_processors = 0  # one program for all parts
    assert torch.equal(rest(1, backend), expected), "parts joined as they are made"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_path_of_a_tree_is_what_a_chain_is(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    sequences = Sequences(SPECS["group"], dtype, device)
    length = 130 * LONG
    own, nodes = sequences.new(length), sequences.new(len(TREE))
    (table,) = block_tables([length + 20], 16, 0)
    backend = sequences.backend()
    sequences.write(backend, table, own[:-1])
    (tree,) = sequences.attend(
        backend, [Segment([0] * (1 + len(TREE)), length - 1, table, TREE)], [torch.cat((own[-1:], nodes))]
    )
    path = [1, 4, 6]  # of the tree: from a root to a leaf
    (chain,) = sequences.attend(
        backend, [Segment([0] * (1 + len(path)), length - 1, table)], [torch.cat((own[-1:], nodes[path]))]
    )
    assert torch.equal(chain, tree[[0, *(1 + node for node in path)]])


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_are_chosen_and_weighed_alike_in_any_company(normalize: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    scores = torch.randn(300, 128, device=device)
    chosen, weights = reference.route(scores, 4, normalize)
    for count in (1, 2, 7, 40, 130):
        got = reference.route(scores[:count], 4, normalize)
        assert torch.equal(got[0], chosen[:count])
        assert torch.equal(got[1], weights[:count]), count


BF16: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True}
AHEAD = [None, "draft_model", "eagle3"]  # steps may be launched before the one before is read
STEP_BY_STEP = [*AHEAD, "ngram", "suffix", "eagle3_tree"]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Result]:
    """Each request alone on the GPU in bfloat16, without speculation."""
    return run(make_engine(tiny_model, **BF16), mixed_work(), together=False)


def check(engine: Any, expected: list[Result]) -> None:
    """Twice: the second time from the prefix cache."""
    for _ in range(2):
        assert_same(run(engine, mixed_work()), expected)


@needs_gpu
@pytest.mark.parametrize(("method", "ahead"), [*((m, True) for m in AHEAD), *((m, False) for m in STEP_BY_STEP)])
def test_texts_are_those_of_plain_decoding(
    tiny_model: Path, draft_models: DraftModels, plain: list[Result], method: str | None, ahead: bool
) -> None:
    spec = METHODS[method](draft_models) if method else None
    engine = make_engine(tiny_model, spec, async_scheduling=ahead, **BF16)
    check(engine, plain)
    assert method is None or engine.stats().spec.num_draft_tokens > 0


@needs_gpu
@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 12, "max_num_seqs": 3}, {"block_size": 4}, {"max_model_len": 120}],
    ids=str,
)
def test_texts_do_not_depend_on_chunks_and_blocks(
    tiny_model: Path, plain: list[Result], settings: dict[str, Any]
) -> None:
    check(make_engine(tiny_model, NGRAM, **BF16, **settings), plain)


@needs_gpu
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen2", "qwen3_moe"])
def test_every_kind_of_family(family: str, tmp_path: Path) -> None:
    """Norms of heads, caps and windows, biases, experts."""
    model = save_tiny_target(tmp_path, family=family, num_hidden_layers=3)
    plain = make_engine(model, **BF16)
    expected = run(plain, mixed_work(), together=False)
    check(plain, expected)
    check(make_engine(model, NGRAM, **BF16), expected)
