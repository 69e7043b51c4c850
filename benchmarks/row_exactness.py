"""What bit-exact rows cost on the torch path: a product in tiles of ROW_TILE rows against torch's own for as many rows.

    python benchmarks/row_exactness.py [--threads 2]

Matrices of SmolLM2-135M, float32, each taken from a set larger than most caches; medians of 15 alternating rounds with
the 10th and 90th percentile. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.reference import ROW_TILE, linear

SHAPES = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
SET_BYTES = 200e6
ROUNDS = 15


def time_us(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> float:
    started = time.perf_counter()
    for weight in weights:
        function(x, weight)
    return (time.perf_counter() - started) / len(weights) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    report = []
    print(f"{'matrix':8} {'rows':>4} {'torch us':>16} {'exact us':>16} {'ratio':>6}   (tiles of {ROW_TILE} rows)")
    with torch.inference_mode():
        for name, (outputs, inputs) in SHAPES.items():
            count = max(2, int(SET_BYTES / (outputs * inputs * 4)))
            weights = [torch.randn(outputs, inputs) for _ in range(count)]
            for rows in (1, 4, 8, 64):
                x = torch.randn(rows, inputs)
                times: dict[str, list[float]] = {"torch": [], "exact": []}
                for _ in range(ROUNDS):
                    times["torch"].append(time_us(F.linear, x, weights))
                    times["exact"].append(time_us(linear, x, weights))
                median = {side: statistics.median(values) for side, values in times.items()}
                spread = {side: statistics.quantiles(values, n=10) for side, values in times.items()}
                cells = [f"{median[s]:7.0f} ({spread[s][0]:.0f}-{spread[s][-1]:.0f})" for s in times]
                ratio = median["exact"] / median["torch"]
                print(f"{name:8} {rows:4} {cells[0]:>16} {cells[1]:>16} {ratio:6.2f}", flush=True)
                row = {"matrix": name, "rows": rows, "torch_us": round(median["torch"], 1)}
                report.append(row | {"exact_us": round(median["exact"], 1), "ratio": round(ratio, 2)})
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "results": report}))


if __name__ == "__main__":
    main()
