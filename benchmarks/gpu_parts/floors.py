"""What a step cannot be faster than: the bytes it reads at the speed of a device copy, the products it computes.

Every floor is of the products, `max(bytes / copy speed, FLOPs / matmul rate)`, and of attention, the bytes of keys and
values that the batch's context has / copy speed, one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

TRIAL_REPEATS = 3


@dataclass(frozen=True)
class Sizes:
    """Of a target and its EAGLE-3 head.

    Attributes:
        weights: elements of the matrices that a pass multiplies by, the output head included.
        kv_bytes: keys and values of a token.
        head_input_weights: of the head's product of the target's states, once a step.
        head_weights: of a pass of the head; its input comes apart.
        head_kv_bytes: the head's keys and values of a token.
    """

    element_bytes: int
    weights: int
    kv_bytes: int
    head_input_weights: int
    head_weights: int
    head_kv_bytes: int


class Speeds(NamedTuple):
    """bytes: read and written a second by a device copy. flops: a second, of a large product."""

    bytes: float
    flops: float

    def products_ms(self, weights: int, rows: int, element_bytes: int) -> float:
        return 1000 * max(weights * element_bytes / self.bytes, 2 * weights * rows / self.flops)

    def attention_ms(self, num_bytes: float) -> float:
        return 1000 * num_bytes / self.bytes


class Floor(NamedTuple):
    """Milliseconds of a step."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


def step_floor(sizes: Sizes, speeds: Speeds, batch: int, context: float, rows: int = 1, head_passes: int = 0) -> Floor:
    """Of a step of the engine.

    Args:
        context: tokens of each request.
        rows: of each request.
        head_passes: of an EAGLE-3 head, before the target's.
    """
    width, keys = sizes.element_bytes, batch * context
    products = speeds.products_ms(sizes.weights, batch * rows, width)
    attention = speeds.attention_ms(keys * sizes.kv_bytes)
    if head_passes:
        products += speeds.products_ms(sizes.head_input_weights, batch, width)
        products += head_passes * speeds.products_ms(sizes.head_weights, batch, width)
        attention += head_passes * speeds.attention_ms(keys * sizes.head_kv_bytes)
    return Floor(products, attention)


def milliseconds(work: Callable[[], object], device: str, repeats: int = 20) -> float:
    """Median time of the device."""
    times = []
    for _ in range(repeats + TRIAL_REPEATS):
        if device != "cuda":
            started = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - started))
            continue
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[TRIAL_REPEATS:])


def recorded(work: Callable[[], object], device: str) -> Callable[[], object]:
    """The same work as a graph, where there are graphs. What it allocates lives as long as the graph."""
    if device != "cuda":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure_speeds(device: str) -> Speeds:
    num_bytes, size = (2 << 30, 8192) if device == "cuda" else (16 << 20, 256)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), device)  # in a graph a copy is slower than weights are read
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    product_ms = milliseconds(recorded(lambda: torch.mm(left, right, out=product), device), device)
    return Speeds(1000 * 2 * num_bytes / copy_ms, 1000 * 2 * size**3 / product_ms)
