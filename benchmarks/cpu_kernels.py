"""What the linear layers of the CPU extension cost, beside torch's.

    python benchmarks/cpu_kernels.py [--quick] [--isa avx2] [--threads 2] [--kinds q4_0,q8_0,torch-bf16] [--rows 1,4,8]
                                     [--shapes 1536x17920] [--megabytes 1024]

For each kind, shape (K x N) and number of rows: microseconds a call, the weights' GB/s, GFLOP/s, and the ratio to one
row, which says what verifying a draft costs. Calls cycle through copies of the matrix that together exceed
--megabytes, so that weights come from memory as they do in a model; numbers of rows take turns, so that a busy
neighbour meets them all. Median over calls, with the 10th and 90th percentile.

With one thread, times are CPU time of the thread; with more, wall time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from forerun.kernels import native
from forerun.kernels.packed import PackedLinear, PackedWeight

SHAPES = [(576, 1536), (576, 960), (1536, 576), (576, 49152), (1536, 17920), (8960, 1536), (1536, 2048)]  # K x N
ROWS = [1, 2, 4, 8, 16, 32, 64, 512]
KINDS = ["q4_0", "q4_1", "q4_k", "q5_0", "q5_k", "q6_k", "q8_0", "bf16", "torch-fp32", "torch-bf16"]
CALLS = 40  # a case, at least
SECONDS = 0.4  # a case, about
FEW = 64  # rows of a step; more are prefill

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    k: int
    n: int
    rows: int
    microseconds: float
    low: float
    high: float
    gigabytes_per_s: float
    gflops: float
    ratio: float  # to one row; 0 where that was not run


def weight_bytes(kind: str, n: int, k: int) -> Tensor:
    """A GGUF tensor's bytes: random blocks with scales of the usual size."""
    ggml_type = GGMLQuantizationType[kind.upper()]
    rng = np.random.default_rng(0)
    if kind in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"):
        raw = quantize(rng.standard_normal((min(n, 64), k), dtype=np.float32), ggml_type)
        return torch.from_numpy(np.resize(raw, (n, raw.shape[1])))
    values, size = GGML_QUANT_SIZES[ggml_type]
    raw = rng.integers(0, 256, (min(n, 64) * k // values, size), dtype=np.uint8)
    place = slice(size - 2, size) if kind == "q6_k" else slice(0, 4)
    scales = np.full((len(raw), 2), 1e-3, np.float16).view(np.uint8)
    raw[:, place] = scales[:, : place.stop - place.start]
    return torch.from_numpy(np.resize(raw.reshape(min(n, 64), -1), (n, k // values * size)))


def native_runs(kind: str, k: int, n: int, total_bytes: int) -> tuple[list[Run], int]:
    if kind == "bf16":
        first = PackedWeight.of_floats(torch.randn(n, k, dtype=torch.bfloat16), kind)
    else:
        first = PackedWeight.of_gguf(weight_bytes(kind, n, k), GGMLQuantizationType[kind.upper()], (n, k))
    weights = [first]
    for _ in range(max(2, min(400, total_bytes // first.num_bytes)) - 1):
        weights.append(PackedWeight.empty(kind, n, k))
        weights[-1].data.copy_(first.data)
    return [PackedLinear([weight]) for weight in weights], first.num_bytes


def torch_runs(kind: str, k: int, n: int, total_bytes: int) -> tuple[list[Run], int]:
    dtype = torch.bfloat16 if kind == "torch-bf16" else torch.float32
    first = torch.randn(n, k).to(dtype)
    num_bytes = first.numel() * first.itemsize
    copies = max(2, min(400, total_bytes // num_bytes))
    weights = [first] + [first.clone() for _ in range(copies - 1)]

    def run(weight: Tensor) -> Run:
        return lambda x: F.linear(x.to(dtype), weight)

    return [run(weight) for weight in weights], num_bytes


def measure(runs: list[Run], k: int, rows: list[int], clock: Callable[[], float]) -> dict[int, list[float]]:
    """Seconds of each call, by number of rows; the rows take turns, the matrices are cycled through."""
    inputs = {count: torch.randn(count, k) for count in rows}
    times: dict[int, list[float]] = {count: [] for count in rows}
    order: Iterator[Run] = itertools.cycle(runs)
    for x in inputs.values():
        next(order)(x)
    end = time.perf_counter() + SECONDS * len(rows)
    while len(times[rows[0]]) < CALLS or (time.perf_counter() < end and len(times[rows[0]]) < 50 * CALLS):
        for count, x in inputs.items():
            run = next(order)
            start = clock()
            run(x)
            times[count].append(clock() - start)
    return times


def cases(kind: str, k: int, n: int, rows: list[int], total_bytes: int, clock: Callable[[], float]) -> list[Case]:
    runs, num_bytes = (torch_runs if kind.startswith("torch") else native_runs)(kind, k, n, total_bytes)
    few, many = [count for count in rows if count <= FEW], [count for count in rows if count > FEW]
    times = measure(runs, k, few, clock) if few else {}
    for count in many:  # apart: megabytes of output drive everything from the caches
        times |= measure(runs, k, [count], clock)
    one = statistics.median(times[1]) if 1 in times else 0.0
    found = []
    for count, seconds in times.items():
        median = statistics.median(seconds)
        low, high = np.percentile(seconds, [10, 90])
        rates = (num_bytes / median / 1e9, 2 * count * k * n / median / 1e9)
        found.append(Case(kind, k, n, count, median * 1e6, low * 1e6, high * 1e6, *rates, median / one if one else 0.0))
    return found


def show(case: Case) -> None:
    print(
        f"{case.kind:>10} {case.k:>5} x {case.n:<6} {case.rows:>4} rows {case.microseconds:>9.1f} us "
        f"({case.low:.1f} .. {case.high:.1f}) {case.gigabytes_per_s:>6.1f} GB/s {case.gflops:>7.1f} GFLOP/s "
        f"{case.ratio:>6.2f}x",
        flush=True,
    )


def read_rate(total_bytes: int, clock: Callable[[], float]) -> float:
    """GB/s at which torch adds up a buffer: how fast memory is right now."""
    buffer = torch.ones(total_bytes // 4)
    seconds = []
    for _ in range(7):
        start = clock()
        buffer.sum()
        seconds.append(clock() - start)
    return total_bytes / statistics.median(seconds) / 1e9


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def commit() -> str:
    result = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and numbers of rows")
    parser.add_argument("--isa", default=native.isa())
    parser.add_argument("--threads", type=int, default=native.num_threads())
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default="")
    parser.add_argument("--shapes", default="", help="K x N, for example 576x1536,1536x576")
    parser.add_argument("--megabytes", type=int, default=1024, help="of each matrix and its copies")
    return parser.parse_args()


def main() -> None:
    args = parse()
    shapes = [(int(k), int(n)) for k, n in (shape.split("x") for shape in args.shapes.split(",") if shape)]
    shapes = shapes or (SHAPES[4:6] if args.quick else SHAPES)
    rows = [int(count) for count in args.rows.split(",") if count] or ([1, 4, 8, 64] if args.quick else ROWS)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    torch.set_num_threads(args.threads)
    found: list[Case] = []
    with native.use(isa=args.isa, num_threads=args.threads):
        rate = read_rate(args.megabytes << 20, clock)
        print(f"{processor()}, {args.isa}, {args.threads} threads, torch {torch.__version__}, read {rate:.1f} GB/s")
        for kind, (k, n) in itertools.product(args.kinds.split(","), shapes):
            if kind.endswith("_k") and k % 256:
                continue  # blocks of 256 along K
            for case in cases(kind, k, n, rows, args.megabytes << 20, clock):
                found.append(case)
                show(case)
    about = {"processor": processor(), "isa": args.isa, "threads": args.threads, "torch": torch.__version__}
    print(json.dumps({**about, "commit": commit(), "read_gb_per_s": rate, "cases": [asdict(case) for case in found]}))


if __name__ == "__main__":
    main()
