"""All backends: against torch's own attention, and bit-exactness of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from forerun.attention import AttentionBackend, AttentionSpec, KVShape, QueryTile, StepLayout
from forerun.attention.native import NativeAttention
from forerun.attention.reference import KEY_TILE, ReferenceAttention
from forerun.kernels import native

from .inputs import inputs_of

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 16

MakeBackend = Callable[..., AttentionBackend]
BACKENDS = [ReferenceAttention, *([NativeAttention] if native.available() else [])]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def cache_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, cache_dtype: torch.dtype) -> MakeBackend:
    def make(window: int | None = None, softcap: float | None = None, scale: float = DIM**-0.5) -> AttentionBackend:
        """Of two layers; the window is the second's."""
        shape = KVShape(num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK)
        spec = AttentionSpec(shape, HEADS, scale, softcap, (None, window))
        pool = torch.zeros(80 * shape.block_bytes(cache_dtype.itemsize), dtype=torch.uint8)
        made: AttentionBackend = request.param(spec, pool, cache_dtype)
        return made

    return make


def stored(attention: AttentionBackend, block: int, layer: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's key and value, [KV_HEADS, DIM] each."""
    if isinstance(attention, NativeAttention):
        return attention.keys[block, layer, :, :, offset], attention.values[block, layer, :, offset]
    assert isinstance(attention, ReferenceAttention)
    return attention.cache[block, layer, 0, offset], attention.cache[block, layer, 1, offset]


def step(
    attention: AttentionBackend, qkv: tuple[torch.Tensor, ...], table: list[int], start: int, stop: int
) -> torch.Tensor:
    """Positions start..stop-1 of one sequence as one step, in tiles of the backend's size."""
    slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, stop)])
    size = attention.row_tile
    tiles = [
        QueryTile(range(first - start, min(first + size, stop) - start), first, table)
        for first in range(start, stop, size)
    ]
    attention.begin(StepLayout(slots, tiles))
    out = [attention.attend(layer, inputs_of(*(t[start:stop] for t in qkv))) for layer in range(2)]
    assert not torch.equal(out[0], torch.zeros_like(out[0]))
    return out[1]


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_qkv(length: int) -> QKV:
    return torch.randn(length, HEADS, DIM), torch.randn(length, KV_HEADS, DIM), torch.randn(length, KV_HEADS, DIM)


def as_cached(qkv: QKV, dtype: torch.dtype) -> QKV:
    """With keys and values as the cache rounds them."""
    return qkv[0], qkv[1].to(dtype).float(), qkv[2].to(dtype).float()


@pytest.mark.parametrize("length", [1, 5, 16, 17, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 700])
def test_equals_torch_attention(backend: MakeBackend, cache_dtype: torch.dtype, length: int) -> None:
    qkv = random_qkv(length)
    query, key, value = as_cached(qkv, cache_dtype)
    table = torch.randperm(80)[: -(-length // BLOCK)].tolist()
    got = step(backend(), qkv, table, 0, length)
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def windowed(
    qkv: tuple[torch.Tensor, ...], window: int | None, softcap: float | None, scale: float = DIM**-0.5
) -> torch.Tensor:
    """Attention in float64, written down as it is defined."""
    query, key, value = (t.double() for t in qkv)
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(query)).unsqueeze(1) - torch.arange(len(query))
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(query))), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).float()


WINDOWS = [1, 2, 100, 127, 128, 129, 256, 300, 599, 600, 10_000]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_hides_what_lies_before_it(backend: MakeBackend, cache_dtype: torch.dtype, window: int) -> None:
    torch.manual_seed(window)
    qkv = as_cached(random_qkv(600), cache_dtype)
    got = step(backend(window), qkv, torch.randperm(80)[:38].tolist(), 0, 600)
    torch.testing.assert_close(got, windowed(qkv, window, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_scores_are_scaled_and_capped(backend: MakeBackend, cache_dtype: torch.dtype, window: int | None) -> None:
    qkv = as_cached(random_qkv(300), cache_dtype)
    got = step(backend(window, 1.5, 0.7), qkv, list(range(20)), 0, 300)
    torch.testing.assert_close(got, windowed(qkv, window, 1.5, 0.7), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, windowed(qkv, window, None, 0.7), atol=0.1), "the cap must matter"


@pytest.mark.parametrize("window", [None, 1, 100, 128, 200, 300])
@pytest.mark.parametrize("chunks", [[600], [1] * 30 + [570], [7, 256, 1, 300, 36], [599, 1], [300, 300]])
def test_rows_do_not_depend_on_chunks(backend: MakeBackend, chunks: list[int], window: int | None) -> None:
    torch.manual_seed(3)
    qkv = random_qkv(600)
    softcap = 3.0 if window == 200 else None
    whole = step(backend(window, softcap), qkv, list(range(38)), 0, 600)
    attention, pieces = backend(window, softcap), []
    for start, stop in itertools.pairwise([0, *itertools.accumulate(chunks)]):
        pieces.append(step(attention, qkv, list(range(70, 32, -1)), start, stop))
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("window", [None, 1, 2, 30, 41])
def test_path_of_a_tree_has_the_bits_of_a_chain(backend: MakeBackend, window: int | None) -> None:
    """Two branches after 40 tokens, nodes interleaved in the cache; each equals the chain of its own path."""
    torch.manual_seed(4)
    context = random_qkv(40)
    branches = [random_qkv(3), random_qkv(3)]
    expected = []
    for branch in branches:
        attention = backend(window)
        both = tuple(torch.cat([c, b]) for c, b in zip(context, branch, strict=True))
        step(attention, both, list(range(3)), 0, 40)
        expected.append(step(attention, both, list(range(3)), 40, 43))
    attention, table = backend(window), [5, 2, 9, 7]
    step(attention, context, table, 0, 40)
    mixed = tuple(torch.stack(pair, 1).flatten(0, 1) for pair in zip(*branches, strict=True))  # a0 b0 a1 b1 a2 b2
    slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(40, 46)]
    tiles = [QueryTile([b, b + 2, b + 4], 40, table, 40, slots[b::2]) for b in range(2)]
    attention.begin(StepLayout(torch.tensor(slots), tiles))
    attention.attend(0, inputs_of(*mixed))
    out = attention.attend(1, inputs_of(*mixed))
    for b in range(2):
        assert torch.equal(out[b::2], expected[b])


def test_move_copies_a_path_in_all_layers(backend: MakeBackend, cache_dtype: torch.dtype) -> None:
    attention = backend()
    qkv = random_qkv(8)
    step(attention, qkv, [3], 0, 8)
    attention.move([3 * BLOCK + 5, 3 * BLOCK + 7], [3 * BLOCK + 1, 3 * BLOCK + 2])
    for layer, (source, target) in itertools.product(range(2), [(5, 1), (7, 2)]):
        key, value = stored(attention, 3, layer, target)
        assert torch.equal(key, qkv[1][source].to(cache_dtype))
        assert torch.equal(value, qkv[2][source].to(cache_dtype))
