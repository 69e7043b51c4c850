"""From the tokens that a pass computes to where they lie in the cache and which tiles read it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from forerun.attention.interface import QueryTile, StepLayout

TILE_FIELDS = 7  # of a record of `flatten_tiles`


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence that a pass computes: a row each.

    Attributes:
        token_ids: consecutive tokens; the last of them may be the nodes of a tree.
        start: position of the first.
        blocks: the sequence's blocks, with room for all rows. The row after `start + i` tokens lies at slot
            `start + i`, wherever its branch stands in the tree.
        parents: of the last rows, the index of each one's parent among them, -1 for the row before them; () where all
            rows are a chain.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    parents: Sequence[int] = ()

    @property
    def num_chained(self) -> int:
        return len(self.token_ids) - len(self.parents)

    @property
    def positions(self) -> list[int]:
        root = self.start + self.num_chained - 1
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return [*range(self.start, root + 1), *(root + depth for depth in depths)]

    def slots(self, block_size: int) -> list[int]:
        places = range(self.start, self.start + len(self.token_ids))
        return [self.blocks[p // block_size] * block_size + p % block_size for p in places]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a step that follow one another in one request's chain; each sees what was before it, and itself."""

    first_row: int
    num_rows: int
    first_position: int
    block_table: Sequence[int]


def lay_out(segments: Iterable[Segment], *, block_size: int, row_tile: int) -> StepLayout:
    """Rows follow one another in the order of the segments."""
    slots: list[int] = []
    tiles: list[QueryTile] = []
    for segment in segments:
        first_row = len(slots)
        slots += segment.slots(block_size)
        tiles += _tiles(segment, first_row, slots[first_row:], row_tile)
    return StepLayout(torch.tensor(slots, dtype=torch.int64), tiles)


def split_chunks(tiles: Sequence[QueryTile], least_rows: int, filling: int) -> tuple[list[Chunk], list[QueryTile]]:
    """The chains that are worth a kernel for long ones, each put together again, and the tiles of all others.

    A row's time is that of its keys. A chunk with so many of them that its last rows would run alone, long after all
    others', stays tiles, whose keys can be split.

    Args:
        least_rows: of a chunk.
        filling: rows that a device computes at once.
    """
    chains = list(_chains(tiles))
    work = most_keys = 0
    for num_keys, num_rows in sorted((c[-1].num_keys, _num_rows(c)) for c in chains if _num_rows(c) >= least_rows):
        work += num_rows * num_keys
        if work >= filling * num_keys:
            most_keys = num_keys
    chunks: list[Chunk] = []
    others: list[QueryTile] = []
    for chain in chains:
        first, num_rows = chain[0], _num_rows(chain)
        if num_rows >= least_rows and chain[-1].num_keys <= most_keys:
            chunks.append(Chunk(first.rows[0], num_rows, first.first_position, first.block_table))
        else:
            others += chain
    return chunks, others


def flatten_tiles(tiles: Sequence[QueryTile], kind: str, first: int = 0) -> tuple[array[int], array[int]]:
    """Tiles for a kernel: all the ints that they hold, and for each tile a record of TILE_FIELDS that says where they
    are: rows at, number of rows, first position, block table at, path slots at, path start, number of path slots.

    Args:
        kind: of the arrays, "q" for 64 bits and "i" for 32.
        first: where the first of the ints will be.
    """
    ints, records = array(kind), array(kind)
    table: Sequence[int] | None = None
    table_at = 0
    for tile in tiles:
        if tile.block_table is not table:
            table, table_at = tile.block_table, first + len(ints)
            ints.extend(table)
        rows_at = first + len(ints)
        ints.extend(tile.rows)
        path_at = first + len(ints)
        ints.extend(tile.path_slots)
        num_path = len(tile.path_slots)
        records.extend((rows_at, len(tile.rows), tile.first_position, table_at, path_at, tile.path_start, num_path))
    return ints, records


def _chains(tiles: Sequence[QueryTile]) -> Iterator[list[QueryTile]]:
    """Tiles that one chain was cut into, together; each other tile alone."""
    run: list[QueryTile] = []
    for tile in tiles:
        if run and not (run[-1].block_table is tile.block_table and _continues(run[-1], tile)):
            yield run
            run = []
        run.append(tile)
    if run:
        yield run


def _num_rows(chain: Sequence[QueryTile]) -> int:
    """0 where it is no chain but part of a tree."""
    return 0 if chain[0].path_slots else sum(len(tile.rows) for tile in chain)


def _continues(before: QueryTile, tile: QueryTile) -> bool:
    """Whether a tile of the same request goes on where a chain's ends, in rows and in positions."""
    chained = not before.path_slots and not tile.path_slots
    return chained and tile.first_position == before.num_keys and tile.rows[0] == before.rows[-1] + 1


def _tiles(segment: Segment, first_row: int, slots: list[int], row_tile: int) -> Iterator[QueryTile]:
    chained = segment.num_chained
    for start in range(0, chained, row_tile):
        rows = range(first_row + start, first_row + min(start + row_tile, chained))
        yield QueryTile(rows, segment.start + start, segment.blocks)
    known = segment.start + chained
    for path, first_new in _paths(segment.parents):
        path_slots = [slots[chained + node] for node in path]
        for start in range(first_new, len(path), row_tile):
            nodes = path[start : start + row_tile]
            rows_of_path = [first_row + chained + node for node in nodes]
            num_seen = start + len(nodes)
            yield QueryTile(rows_of_path, known + start, segment.blocks, known, path_slots[:num_seen])


def _paths(parents: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Root-to-leaf paths that cover every node, each with the place of its first node that no earlier path has."""
    inner = set(parents)
    covered: set[int] = set()
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path = [leaf]
        while (node := parents[path[-1]]) >= 0:
            path.append(node)
        path.reverse()
        first_new = next(place for place, node in enumerate(path) if node not in covered)
        covered.update(path)
        yield path, first_new
