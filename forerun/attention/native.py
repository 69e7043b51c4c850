"""Attention in the CPU extension: paged, exact rows, keys split over threads where there are many.

Keys are taken in splits of 128 counted from position 0 and joined in order, so that a row's bits depend on its own
query, keys and values only: not on other rows, tiles, threads, chunks, blocks or the instruction set. Splits that lie
before a window are left out, and keys before it within a split are not touched.

Ask `forerun.kernels.native.available()` first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.attention.interface import AttentionInputs, AttentionSpec, QueryTile, StepLayout
from forerun.attention.layout import flatten_tiles
from forerun.attention.slots import BlockTables, SlotBatch, SlotRows, host_layout
from forerun.kernels.native import extension


class NativeAttention:
    """Paged keys and values over the byte pool: [blocks, layers, keys then values]. A block's keys are
    [kv_heads, D, block_size], its values [kv_heads, block_size, D].

    Args:
        spec: of the model.
        pool: [bytes] uint8; what was never written is never read into a result.
        dtype: of keys and values, float32 or bfloat16; queries and results are float32.
    """

    row_tile = 16
    title = "the CPU extension"

    def __init__(self, spec: AttentionSpec, pool: Tensor, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"keys and values are float32 or bfloat16, not {dtype}")
        shape = spec.shape
        self.spec = spec
        self.shape = shape
        block_bytes = shape.block_bytes(dtype.itemsize)
        self._num_blocks = pool.shape[0] // block_bytes
        cache = pool[: self._num_blocks * block_bytes].view(dtype)
        cache = cache.view(self._num_blocks, shape.num_layers, 2, shape.num_kv_heads, -1)
        places = (self._num_blocks, shape.num_layers, shape.num_kv_heads)
        self.keys = cache[:, :, 0].view(*places, shape.head_dim, shape.block_size)
        self.values = cache[:, :, 1].view(*places, shape.block_size, shape.head_dim)
        self._native = extension().Attention(
            shape.num_layers,
            spec.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            dtype == torch.bfloat16,
            cache.data_ptr(),
            spec.scale,
            spec.softcap or 0.0,
            [spec.window(layer) or 0 for layer in range(shape.num_layers)],
        )

    def begin(self, layout: StepLayout) -> None:
        self._slots = layout.slots.contiguous()
        assert not len(self._slots) or int(self._slots.max()) < self._num_blocks * self.shape.block_size
        self._checked = False
        tables = {id(tile.block_table): tile.block_table for tile in layout.tiles}
        assert all(max(table, default=0) < self._num_blocks for table in tables.values())
        for tile in layout.tiles:
            self._check_tile(tile)
        self._ints, self._tiles = flatten_tiles(layout.tiles, "q")  # records are the extension's AttentionTile
        self._native.begin(
            self._slots.data_ptr(),
            self._slots.shape[0],
            self._tiles.buffer_info()[0],
            len(layout.tiles),
            self._ints.buffer_info()[0],
        )

    def begin_slots(self, batch: SlotBatch, blocks: BlockTables) -> SlotRows:
        layout, rows = host_layout(batch, blocks, block_size=self.shape.block_size, row_tile=self.row_tile)
        self.begin(layout)
        return rows

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        query, key, value = inputs.heads()
        if not self._checked:  # all layers are alike
            self._check(query, self.spec.num_heads)
            self._check(key, self.shape.num_kv_heads)
            self._check(value, self.shape.num_kv_heads)
            self._checked = True
        num_rows = self._slots.shape[0]
        out = torch.empty(query.shape[0], self.spec.num_heads, self.shape.head_dim)
        if query.shape[0] > num_rows:
            out[num_rows:] = 0
        self._native.attend(
            layer,
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            out.data_ptr(),
            out.stride(0),
        )
        return out

    def write(self, layer: int, inputs: AttentionInputs) -> None:
        _, key, value = inputs.heads()
        self._check(key, self.shape.num_kv_heads)
        self._check(value, self.shape.num_kv_heads)
        self._native.begin(self._slots.data_ptr(), self._slots.shape[0], 0, 0, 0)  # no tile: nobody attends
        self._native.attend(layer, 0, 0, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), 0, 0)

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        size = self.shape.block_size
        source, target = torch.tensor(source_slots), torch.tensor(target_slots)
        self.keys[target // size, ..., target % size] = self.keys[source // size, ..., source % size]
        values = self.values.transpose(3, 4)
        values[target // size, ..., target % size] = values[source // size, ..., source % size]

    def _check_tile(self, tile: QueryTile) -> None:
        num_path = len(tile.path_slots)
        known = tile.path_start if num_path else tile.num_keys
        assert known <= len(tile.block_table) * self.shape.block_size
        assert not num_path or tile.path_start + num_path >= tile.num_keys

    def _check(self, x: Tensor, num_heads: int) -> None:
        dim = self.shape.head_dim
        assert x.dtype == torch.float32
        assert x.shape[0] >= self._slots.shape[0]
        assert x.shape[1:] == (num_heads, dim), x.shape
        assert x.stride()[1:] == (dim, 1), x.stride()
