"""Which passes graphs are recorded for."""

from __future__ import annotations

import itertools

import pytest

from forerun.memory.passes import MOST_GRAPH_ROWS, graph_shapes

MOST_PADDED = 8  # rows of one row a request, up to 64 of them; above, a quarter of the batch


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100, 256, 1000])
def test_every_batch_has_a_graph_that_is_not_much_larger(max_num_seqs: int) -> None:
    sizes = [size for size, _ in graph_shapes(max_num_seqs, (1,), 16)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for below, size in itertools.pairwise([0, *sizes]):
        assert size - below <= max(MOST_PADDED, size // 4)


def test_256_requests_of_4_rows_have_a_graph_and_longer_passes_none() -> None:
    assert (256, 4) in graph_shapes(256, (1, 4), 16)
    assert all(size * rows <= MOST_GRAPH_ROWS for size, rows in graph_shapes(512, (1, 4), 16))
    assert all(rows == 1 for _, rows in graph_shapes(8, (1, 17), 16))
