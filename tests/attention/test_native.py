"""What only the native backend has: instruction sets, threads, odd sizes, bf16 caches, strided rows. The rest of its
tests are in test_reference.py, which runs on all backends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forerun.attention import AttentionInputs, AttentionSpec, KVShape, QueryTile, StepLayout
from forerun.attention.native import NativeAttention
from forerun.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the CPU extension is not built")

ISAS = native.isas() if native.available() else []
SPLIT = 128


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True)
class Sizes:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    block: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None

    def spec(self) -> AttentionSpec:
        shape = KVShape(num_layers=2, num_kv_heads=self.kv_heads, head_dim=self.dim, block_size=self.block)
        return AttentionSpec(shape, self.heads, self.dim**-0.5, self.softcap, (None, self.window))

    def backend(self, num_keys: int = 1024) -> NativeAttention:
        num_bytes = -(-num_keys // self.block) * self.spec().shape.block_bytes(self.dtype.itemsize)
        pool = torch.full((num_bytes,), 255, dtype=torch.uint8)
        return NativeAttention(self.spec(), pool, self.dtype)  # all NaN: what nobody wrote, nobody may read

    def qkv(self, length: int) -> Tensor:
        """[length, heads + 2 kv_heads, D], as a layer hands it over"""
        return torch.randn(length, self.heads + 2 * self.kv_heads, self.dim)

    def parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = qkv.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), 1)
        return query, key, value

    def inputs(self, qkv: Tensor) -> AttentionInputs:
        return AttentionInputs(qkv.flatten(1), self.heads, self.kv_heads)

    def expected(self, qkv: Tensor) -> Tensor:
        """Causal attention in float64, on keys and values as the cache rounds them."""
        query, key, value = self.parts(qkv)
        key, value = key.to(self.dtype), value.to(self.dtype)
        key, value = (t.double().repeat_interleave(self.heads // self.kv_heads, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * self.dim**-0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = torch.arange(len(query)).unsqueeze(1) - torch.arange(len(query))
        hidden = (distance < 0) | (distance >= (self.window or len(query)))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value).float()


def run(
    attention: NativeAttention, sizes: Sizes, qkv: Tensor, table: list[int], start: int, stop: int, tile: int = 16
) -> Tensor:
    """Positions start..stop-1 of one sequence as one step."""
    size = sizes.block
    slots = torch.tensor([table[p // size] * size + p % size for p in range(start, stop)])
    tiles = [
        QueryTile(range(first - start, min(first + tile, stop) - start), first, table)
        for first in range(start, stop, tile)
    ]
    attention.begin(StepLayout(slots, tiles))
    return attention.attend(1, sizes.inputs(qkv[start:stop]))


def shuffled(sizes: Sizes, num_keys: int) -> list[int]:
    return torch.randperm(-(-num_keys // sizes.block)).tolist()


SIZES = [
    Sizes(),
    Sizes(heads=9, kv_heads=3, dim=64),
    Sizes(heads=14, kv_heads=2, dim=64),
    Sizes(heads=4, kv_heads=4, dim=128),
    Sizes(heads=8, kv_heads=1, dim=80),
    Sizes(heads=3, kv_heads=1, dim=24),
    Sizes(heads=2, kv_heads=1, dim=6),
    Sizes(heads=2, kv_heads=2, dim=32, block=32),
    Sizes(heads=2, kv_heads=1, dim=32, block=24),
    Sizes(heads=2, kv_heads=1, dim=16, block=5),
    Sizes(heads=2, kv_heads=1, dim=16, block=1),
    Sizes(dtype=torch.bfloat16),
    Sizes(heads=3, kv_heads=1, dim=24, block=5, dtype=torch.bfloat16),
    Sizes(heads=9, kv_heads=3, dim=64, dtype=torch.bfloat16),
    Sizes(window=1),
    Sizes(window=5, heads=4, kv_heads=1, dim=256),
    Sizes(window=100, heads=9, kv_heads=3, dim=64),
    Sizes(window=128, heads=3, kv_heads=1, dim=24, block=5, dtype=torch.bfloat16),
    Sizes(window=129, softcap=1.5),
    Sizes(window=200, softcap=4.0, heads=2, kv_heads=1, dim=6),
    Sizes(softcap=1.0, heads=4, kv_heads=4, dim=128),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_attention_in_float64(sizes: Sizes, isa: str) -> None:
    qkv = sizes.qkv(300)
    with native.use(isa=isa):
        got = run(sizes.backend(), sizes, qkv, shuffled(sizes, 1024), 0, 300)
    torch.testing.assert_close(got, sizes.expected(qkv), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_are_those_of_any_isa_threads_chunks_tiles_and_blocks(sizes: Sizes) -> None:
    qkv = sizes.qkv(300)
    whole = run(sizes.backend(), sizes, qkv, shuffled(sizes, 1024), 0, 300)
    chunks = itertools.cycle([[300], [130, 1, 1, 1, 7, 160], [1, 127, 1, 171]])
    for isa, threads, tile in itertools.product(ISAS, (1, 2, 4), (16, 1, 5)):
        attention, table, pieces = sizes.backend(), shuffled(sizes, 1024), []
        with native.use(isa=isa, num_threads=threads):
            for start, stop in itertools.pairwise([0, *itertools.accumulate(next(chunks))]):
                pieces.append(run(attention, sizes, qkv, table, start, stop, tile))
        assert torch.equal(torch.cat(pieces), whole), (isa, threads, tile)


def one_row(sizes: Sizes, attention: NativeAttention, qkv: Tensor, table: list[int]) -> Tensor:
    """The last row of qkv by itself, the others before it."""
    length = len(qkv)
    run(attention, sizes, qkv, table, 0, length - 1)
    return run(attention, sizes, qkv, table, length - 1, length)


@pytest.mark.parametrize("window", [None, 1, SPLIT, 1000])
@pytest.mark.parametrize("length", [1, 2, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 8000])
def test_one_row_after_many_keys(length: int, window: int | None) -> None:
    sizes = Sizes(heads=2, kv_heads=1, dim=64, window=window)
    qkv = sizes.qkv(length)
    table = shuffled(sizes, length)
    results = []
    for isa, threads in itertools.product(ISAS[1:] or ISAS, (1, 2, 4)):
        with native.use(isa=isa, num_threads=threads):
            results.append(one_row(sizes, sizes.backend(length), qkv, table))
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0][0], sizes.expected(qkv)[-1], rtol=1e-4, atol=1e-5)


@dataclass
class Request:
    """One sequence of a step: its rows, where they lie, and what they come to."""

    qkv: Tensor
    table: list[int]
    start: int


def test_a_step_of_many_requests_has_the_bits_of_each_alone() -> None:
    sizes = Sizes(heads=9, kv_heads=3, dim=64)
    lengths = [(40, 3), (1, 1), (129, 20), (200, 1), (17, 17), (300, 5)]  # keys, of which new
    requests = [Request(sizes.qkv(keys), [], keys - new) for keys, new in lengths]
    together, free = sizes.backend(2048), iter(shuffled(sizes, 2048))
    expected = []
    for request in requests:
        request.table = [next(free) for _ in range(-(-len(request.qkv) // sizes.block))]
        alone = sizes.backend(2048)
        for attention in (alone, together):
            if request.start:
                run(attention, sizes, request.qkv, request.table, 0, request.start)
        expected.append(run(alone, sizes, request.qkv, request.table, request.start, len(request.qkv)))
    slots, tiles, rows = [], [], []
    for request in requests:
        positions = range(request.start, len(request.qkv))
        slots += [request.table[p // sizes.block] * sizes.block + p % sizes.block for p in positions]
        for first in range(0, len(positions), 16):
            count = min(16, len(positions) - first)
            tiles.append(
                QueryTile(range(len(rows) + first, len(rows) + first + count), positions[first], request.table)
            )
        rows += request.qkv[request.start :].unbind(0)
    for threads in (1, 2, 4):
        with native.use(num_threads=threads):
            together.begin(StepLayout(torch.tensor(slots), tiles))
            got = together.attend(1, sizes.inputs(torch.stack(rows)))
        assert torch.equal(got, torch.cat(expected))


TREES = [Sizes(), Sizes(dim=24, block=5, dtype=torch.bfloat16), Sizes(window=7), Sizes(window=130, softcap=2.0)]


@pytest.mark.parametrize("sizes", TREES, ids=str)
@pytest.mark.parametrize("context", [3, 40, 120, 256, 300])
def test_paths_of_a_tree_have_the_bits_of_chains(sizes: Sizes, context: int) -> None:
    """Three branches of 20 nodes, interleaved in the cache; some cross the border of a split."""
    num_branches, depth = 3, 20
    past, branches = sizes.qkv(context), [sizes.qkv(depth) for _ in range(num_branches)]
    expected = []
    for branch in branches:
        attention, table = sizes.backend(), shuffled(sizes, 1024)
        run(attention, sizes, torch.cat([past, branch]), table, 0, context)
        expected.append(run(attention, sizes, torch.cat([past, branch]), table, context, context + depth))
    attention, table = sizes.backend(), shuffled(sizes, 1024)
    run(attention, sizes, past, table, 0, context)
    mixed = torch.stack(branches, 1).flatten(0, 1)
    positions = range(context, context + len(mixed))
    slots = [table[p // sizes.block] * sizes.block + p % sizes.block for p in positions]
    tiles = []
    for b, first in itertools.product(range(num_branches), (0, 16)):
        rows = range(b, len(mixed), num_branches)[first : first + 16]
        path = slots[b::num_branches][: first + len(rows)]
        tiles.append(QueryTile(rows, context + first, table, context, path))
    for isa, threads in itertools.product(ISAS, (1, 4)):
        with native.use(isa=isa, num_threads=threads):
            attention.begin(StepLayout(torch.tensor(slots), tiles))
            out = attention.attend(1, sizes.inputs(mixed))
        for b in range(num_branches):
            assert torch.equal(out[b::num_branches], expected[b]), (isa, threads, b)


def test_a_moved_path_is_read_as_a_chain() -> None:
    sizes = Sizes()
    qkv, table = sizes.qkv(60), shuffled(sizes, 1024)
    attention = sizes.backend()
    run(attention, sizes, qkv, table, 0, 50)
    expected = run(attention, sizes, qkv, table, 50, 60)
    slot = lambda p: table[p // 16] * 16 + p % 16  # noqa: E731
    far = [slot(p) for p in range(60, 80)]
    order = torch.randperm(10)
    attention.move([slot(p) for p in range(40, 50)], [far[i] for i in order.tolist()])
    for p in range(40, 50):  # nothing of them is left
        attention.keys[table[p // 16], :, :, :, p % 16] = float("nan")
        attention.values[table[p // 16], :, :, p % 16] = float("nan")
    attention.move([far[i] for i in order.tolist()], [slot(p) for p in range(40, 50)])
    assert torch.equal(run(attention, sizes, qkv, table, 50, 60), expected)


def test_padding_rows_are_zero() -> None:
    sizes = Sizes()
    attention = sizes.backend()
    qkv, table = sizes.qkv(8), shuffled(sizes, 1024)
    attention.begin(StepLayout(torch.tensor([table[0] * 16 + p for p in range(3)]), [QueryTile(range(3), 0, table)]))
    out = attention.attend(0, sizes.inputs(qkv))
    assert out.shape == (8, sizes.heads, sizes.dim)
    assert not out[3:].any()
    assert torch.equal(out[:3], run(sizes.backend(), sizes, qkv, table, 0, 3))


def test_a_row_does_not_see_what_is_not_finite_after_it() -> None:
    sizes = Sizes()
    qkv, table = sizes.qkv(200), shuffled(sizes, 1024)
    expected = run(sizes.backend(), sizes, qkv, table, 0, 200)
    qkv[150] = float("nan")
    got = run(sizes.backend(), sizes, qkv, table, 0, 200)
    assert torch.equal(got[:150], expected[:150])
    assert got[150:].isnan().all()


@pytest.mark.parametrize("window", [1, 20, 129, 150])
def test_a_row_does_not_see_what_is_not_finite_before_its_window(window: int) -> None:
    """Within its first split and in those before it; so blocks that no window reaches may hold anything."""
    sizes = Sizes(window=window)
    qkv, table = sizes.qkv(300), shuffled(sizes, 1024)
    expected = run(sizes.backend(), sizes, qkv, table, 0, 300)
    qkv[:100] = float("nan")
    for isa, tile in itertools.product(ISAS, (16, 3)):
        with native.use(isa=isa):
            got = run(sizes.backend(), sizes, qkv, table, 0, 300, tile)
        assert torch.equal(got[99 + window :], expected[99 + window :])
        assert got[98 + window].isnan().all()


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
def test_scores_of_any_size(scale: float) -> None:
    sizes = Sizes()
    qkv, table = sizes.qkv(200), shuffled(sizes, 1024)
    qkv[:, : sizes.heads] *= scale
    got = run(sizes.backend(), sizes, qkv, table, 0, 200)
    torch.testing.assert_close(got, sizes.expected(qkv), rtol=1e-3, atol=1e-3 if scale > 100 else 1e-4)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        NativeAttention(Sizes().spec(), torch.zeros(1 << 12, dtype=torch.uint8), torch.float16)


def test_no_rows_give_no_rows() -> None:
    sizes = Sizes()
    attention = sizes.backend()
    attention.begin(StepLayout(torch.tensor([], dtype=torch.int64), []))
    assert attention.attend(0, sizes.inputs(sizes.qkv(0))).shape == (0, 6, 16)
