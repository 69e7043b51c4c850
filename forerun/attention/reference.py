"""Attention in plain torch whose rows are bit-exact.

All work is done in pieces of one shape, QUERY_TILE rows by KEY_TILE keys, key tiles counted from position 0 and added
up in order. A row's result therefore depends on its own query and keys only: not on other rows, on the chunk it came
in, or on blocks that were taken from the prefix cache. A key tile that lies before a row's window adds zeros to zeros,
so that it does not matter whether the row's tile starts with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.attention.interface import AttentionInputs, AttentionSpec, QueryTile, StepLayout
from forerun.attention.slots import BlockTables, SlotBatch, SlotRows, host_layout
from forerun.kernels.reference import ROW_TILE, soft_cap

KEY_TILE = 256


class ReferenceAttention:
    """Paged keys and values, `cache` [blocks, layers, 2, block_size, kv_heads, D], a view of the byte pool: blocks one
    after the other, or, where the pool is this group's alone, layers: what a pass reads then lies together.

    Args:
        spec: of the model.
        pool: [bytes] uint8, zeros: masked keys are multiplied by zero, so that memory must not hold NaN.
        dtype: of keys and values; what is computed with them has the queries' dtype.
        alone: whether no other group has blocks in the pool.
    """

    row_tile = ROW_TILE
    title = "plain torch"
    heads_outermost = False
    """Whether a block's memory is [2, kv_heads, block_size, D]: what is read of a head lies together."""

    def __init__(self, spec: AttentionSpec, pool: Tensor, dtype: torch.dtype, alone: bool = False) -> None:
        shape = spec.shape
        self.spec = spec
        self.shape = shape
        block_bytes = shape.block_bytes(dtype.itemsize)
        num_blocks = pool.shape[0] // block_bytes
        memory = pool[: num_blocks * block_bytes].view(dtype)
        outer = (shape.num_layers, num_blocks) if alone else (num_blocks, shape.num_layers)
        inner = (
            (shape.num_kv_heads, shape.block_size) if self.heads_outermost else (shape.block_size, shape.num_kv_heads)
        )
        cache = memory.view(*outer, 2, *inner, shape.head_dim)
        cache = cache.transpose(0, 1) if alone else cache
        self.cache = cache.transpose(3, 4) if self.heads_outermost else cache
        self._positions = torch.arange(KEY_TILE, device=pool.device)

    def begin(self, layout: StepLayout) -> None:
        self._slots = layout.slots.to(self.cache.device)
        self._blocks, self._offsets = self._slots // self.shape.block_size, self._slots % self.shape.block_size
        self._groups = [
            (torch.tensor(table, device=self.cache.device), list(tiles))
            for table, tiles in itertools.groupby(layout.tiles, key=lambda tile: tile.block_table)
        ]

    def begin_slots(self, batch: SlotBatch, blocks: BlockTables) -> SlotRows:
        layout, rows = host_layout(batch, blocks, block_size=self.shape.block_size, row_tile=self.row_tile)
        self.begin(layout)
        return rows

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        query, key, value = inputs.heads()
        self._store(layer, key, value)
        stored = self.cache[:, layer]  # [blocks, 2, block_size, kv_heads, D]
        out = torch.zeros_like(query)
        for table, tiles in self._groups:
            num_keys = max(tile.num_keys for tile in tiles)
            keys_values = self._gather(stored, table, num_keys, query.dtype)
            for tile in tiles:
                path = self._follow_path(stored, keys_values, tile) if tile.path_slots else keys_values
                out[list(tile.rows)] = self._attend_tile(query[list(tile.rows)], path, tile, self.spec.window(layer))
        return out

    def write(self, layer: int, inputs: AttentionInputs) -> None:
        self._store(layer, *inputs.heads()[1:])

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        num_rows = self._slots.shape[0]
        stored = self.cache[:, layer]  # [blocks, 2, block_size, kv_heads, D]
        stored[self._blocks, 0, self._offsets] = key[:num_rows].to(stored.dtype)
        stored[self._blocks, 1, self._offsets] = value[:num_rows].to(stored.dtype)

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        size = self.shape.block_size
        source, target = (torch.tensor(slots, device=self.cache.device) for slots in (source_slots, target_slots))
        self.cache[target // size, :, :, target % size] = self.cache[source // size, :, :, source % size]

    def _gather(self, stored: Tensor, table: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
        """[2, kv_heads, keys rounded up to KEY_TILE, D]; zero past the keys."""
        num_blocks = -(-num_keys // self.shape.block_size)
        padded = -(-num_keys // KEY_TILE) * KEY_TILE
        gathered = stored.new_empty(2, self.shape.num_kv_heads, padded, self.shape.head_dim, dtype=dtype)
        blocks = stored[table[:num_blocks]]  # [n, 2, block_size, kv_heads, D]
        gathered[:, :, :num_keys] = blocks.permute(1, 3, 0, 2, 4).flatten(2, 3)[:, :, :num_keys]
        gathered[:, :, num_keys:] = 0  # what lies in a block past them is somebody's leavings, perhaps NaN
        return gathered

    def _follow_path(self, stored: Tensor, keys_values: Tensor, tile: QueryTile) -> Tensor:
        """The same with the path's own tokens at their positions."""
        slots = torch.tensor(list(tile.path_slots), device=stored.device)
        own = stored[slots // self.shape.block_size, :, slots % self.shape.block_size]  # [n, 2, kv_heads, D]
        path = keys_values.clone()
        path[:, :, tile.path_start : tile.path_start + len(slots)] = own.permute(1, 2, 0, 3).to(path.dtype)
        return path

    def _attend_tile(self, query: Tensor, keys_values: Tensor, tile: QueryTile, window: int | None) -> Tensor:
        """query [n, heads, D] of one tile -> [n, heads, D]."""
        num_rows, num_heads, head_dim = query.shape
        kv_heads = self.shape.num_kv_heads
        grouped = query.new_zeros(kv_heads, num_heads // kv_heads, ROW_TILE, head_dim)
        grouped[:, :, :num_rows] = query.view(num_rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3) * self.spec.scale
        grouped = grouped.flatten(1, 2)  # [kv_heads, M, D], M = heads of a group x ROW_TILE
        positions = (tile.first_position + self._positions[:ROW_TILE]).unsqueeze(1)
        first_seen = 0 if window is None else max(0, tile.first_position + 1 - window)
        key_tiles = range(first_seen // KEY_TILE * KEY_TILE, tile.num_keys, KEY_TILE)

        scores: list[Tensor] = []
        maximum = query.new_full((kv_heads, grouped.shape[1], 1), float("-inf"))
        for first in key_tiles:
            score = torch.bmm(grouped, keys_values[0, :, first : first + KEY_TILE].transpose(1, 2))
            if self.spec.softcap is not None:
                score = soft_cap(score, self.spec.softcap)
            keys = first + self._positions
            hidden = keys > positions  # [ROW_TILE, KEY_TILE]
            if window is not None:
                hidden |= keys <= positions - window
            score = score.view(kv_heads, -1, ROW_TILE, KEY_TILE).masked_fill(hidden, float("-inf")).flatten(1, 2)
            maximum = torch.maximum(maximum, score.amax(dim=-1, keepdim=True))
            scores.append(score)

        total = query.new_zeros(kv_heads, grouped.shape[1], 1)
        out = torch.zeros_like(grouped)
        for first, score in zip(key_tiles, scores, strict=True):
            weights = torch.exp(score - maximum)
            total = total + weights.sum(dim=-1, keepdim=True)
            out = torch.baddbmm(out, weights, keys_values[1, :, first : first + KEY_TILE])
        out = (out / total).view(kv_heads, -1, ROW_TILE, head_dim)[:, :, :num_rows]
        return out.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
