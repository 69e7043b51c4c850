"""What a pass takes beside weights and caches, as numbers: activations, and the graphs of small passes. No torch here.

An engine on a GPU measures its largest pass at start; this is for who has no GPU, or no weights yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from forerun.models.config import DecoderConfig

BATCHES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16))  # requests of a graph, closer where padding costs more
BATCH_STEP = 32  # after them
MOST_GRAPH_ROWS = 1024  # longer passes keep the GPU busy by themselves
GRAPH_BYTES = 11 << 20  # of one graph: 10.6 MiB were measured for 36 layers
LOGIT_BYTES = 8  # a float32 logit and its probability


def graph_shapes(max_num_seqs: int, rows: Sequence[int], row_tile: int) -> list[tuple[int, int]]:
    """(requests, rows of each) that graphs are worth recording for.

    Args:
        rows: that a request usually has in a step.
        row_tile: most rows of a request that the attention takes at once.
    """
    sizes = [size for size in (*BATCHES, *range(128, max_num_seqs, BATCH_STEP)) if size < max_num_seqs]
    return [
        (size, num_rows)
        for size, num_rows in itertools.product((*sizes, max_num_seqs), rows)
        if size * num_rows <= MOST_GRAPH_ROWS and num_rows <= row_tile
    ]


def pass_bytes(config: DecoderConfig, num_rows: int, num_logits: int, element_bytes: int, num_taps: int = 0) -> int:
    """Peak memory of a pass of the decoder: that of its widest layer, or that of the logits after the last.

    Args:
        num_rows: tokens of the pass.
        num_logits: rows that get logits and probabilities.
        element_bytes: of a value of the residual stream.
        num_taps: states that are kept beside it.
    """
    hidden, middle = config.hidden_size, config.intermediate_size
    if config.moe is not None:
        middle = max(middle if config.moe.dense_layers else 0, config.moe.intermediate_size)
    kept = (1 + num_taps) * hidden  # the residual stream and what was copied of it
    attention = 2 * config.query_size + 2 * config.kv_size + hidden  # q, k, v side by side; what was attended
    mlp = 3 * middle + hidden  # gate and up, their product; what went in or what comes out
    if config.moe is not None:
        mlp += 3 * hidden  # the sum over experts, an expert's rows and what it makes of them
    layer = num_rows * (kept + max(attention, mlp)) * element_bytes
    logits = num_rows * (kept + hidden) * element_bytes + num_logits * config.vocab_size * LOGIT_BYTES
    return max(layer, logits)


def rope_bytes(config: DecoderConfig, max_positions: int, element_bytes: int) -> int:
    """Of the tables of cosines and sines."""
    return sum(max_positions * rope.rotated(config.head_dim) * element_bytes for rope in config.ropes)
