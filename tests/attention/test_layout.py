"""Which rows of a step are one chunk."""

from __future__ import annotations

import pytest

from forerun.attention import QueryTile, Segment, lay_out
from forerun.attention.layout import Chunk, split_chunks

TREE = (-1, -1, 0, 0)
LEAST = 20


def split(*segments: Segment, filling: int = 1) -> tuple[list[Chunk], list[QueryTile], list[QueryTile]]:
    """Chunks, other tiles, and all tiles."""
    tiles = list(lay_out(segments, block_size=4, row_tile=8).tiles)
    return *split_chunks(tiles, LEAST, filling), tiles


@pytest.mark.parametrize("num_rows", [LEAST, LEAST + 1, 24, 25, 100])
@pytest.mark.parametrize("start", [0, 7])
def test_a_long_chain_is_one_chunk(num_rows: int, start: int) -> None:
    table = list(range(50))
    chunks, others, _ = split(Segment([0] * num_rows, start, table))
    assert chunks == [Chunk(0, num_rows, start, table)]
    assert not others


def test_short_chains_and_single_rows_stay_tiles() -> None:
    segments = [
        Segment([0] * (LEAST - 1), 0, [*range(9)]),
        Segment([0], 30, [*range(9)]),
        Segment([0] * 8, 2, [0, 1, 2]),
    ]
    chunks, others, tiles = split(*segments)
    assert not chunks
    assert others == tiles


def test_chunks_of_a_mixed_step_keep_their_rows() -> None:
    first, second, other = list(range(20)), list(range(20, 40)), [40, 41]
    chunks, others, tiles = split(
        Segment([0], 5, other), Segment([0] * 30, 3, first), Segment([0] * 2, 6, other), Segment([0] * 21, 40, second)
    )
    assert chunks == [Chunk(1, 30, 3, first), Chunk(33, 21, 40, second)]
    assert others == [tile for tile in tiles if tile.block_table is other]


def test_neighbours_are_not_one_chunk() -> None:
    """Two prompts that together are long, even where the second starts at the position where the first ends."""
    chunks, others, tiles = split(Segment([0] * 16, 0, [*range(8)]), Segment([0] * 16, 16, [*range(8)]))
    assert not chunks
    assert others == tiles


def test_a_tree_after_a_long_chain_stays_tiles() -> None:
    table = list(range(20))
    chunks, others, tiles = split(Segment([0] * (30 + len(TREE)), 2, table, TREE))
    assert chunks == [Chunk(0, 30, 2, table)]
    assert others == [tile for tile in tiles if tile.path_slots]
    assert others


def test_rows_of_a_wide_tree_are_no_chunk() -> None:
    chain = tuple(range(-1, LEAST + 4))  # a path that is longer than a chunk must be
    chunks, others, tiles = split(Segment([0] * (1 + len(chain)), 2, list(range(20)), chain))
    assert not chunks
    assert others == tiles


def test_a_chunk_that_leaves_a_device_idle_stays_tiles() -> None:
    table = list(range(300))
    assert split(Segment([0] * 30, 1000, table), filling=30)[0]
    assert not split(Segment([0] * 29, 1000, table), filling=30)[0]


def test_short_prompts_fill_a_device_together_but_do_not_hide_a_long_one() -> None:
    tables = [list(range(i, i + 300)) for i in range(4)]
    prompts = [Segment([0] * 25, 0, table) for table in tables[:3]]
    long = Segment([0] * 25, 1000, tables[3])
    chunks, others, _ = split(*prompts, long, filling=60)
    assert [chunk.block_table for chunk in chunks] == tables[:3]
    assert {id(tile.block_table) for tile in others} == {id(tables[3])}
    assert len(split(*prompts, long, filling=25)[0]) == 4
