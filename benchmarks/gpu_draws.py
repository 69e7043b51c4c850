"""What it costs on a GPU to turn logits into tokens and verdicts, beside the time to read the logits once.

    python benchmarks/gpu_draws.py [--rows 1 4 64 256 1024] [--vocab 151936] [--dtype bfloat16] [--plain]

Each figure is the median of replays of one CUDA graph that holds `slots.draw_rows` and `slots.judge` (requests of four
rows each, where rows allow it), in microseconds. Logits are random, spread as a language model's are (a few likely
tokens, a long tail); "flat" ones have none that are likely, so that top_p keeps most of the vocabulary. The floor is
the bytes of the logits at the speed of a device copy. `--plain`: the functions in plain torch. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from forerun.request import SamplingParams
from forerun.sampling import slots as sampling

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "flat, top_p 0.95": SamplingParams(top_p=0.95),
}
ROWS_A_REQUEST = 4
MEBIBYTE = 1 << 20


def microseconds(work: Callable[[], object], repeats: int = 50) -> float:
    times = []
    for _ in range(repeats + 5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop))
    return statistics.median(times[5:])


def copy_speed() -> float:
    """Bytes a microsecond that a device copy reads and writes, both counted."""
    source, target = (torch.empty(1024 * MEBIBYTE, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.numel() / microseconds(lambda: target.copy_(source))


def make_logits(rows: int, vocab: int, dtype: torch.dtype, flat: bool) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator, device="cuda") * (0.5 if flat else 2.5)
    if not flat:
        places = torch.randint(vocab, (rows, 30), generator=generator, device="cuda")
        logits.scatter_add_(1, places, torch.linspace(6.0, 14.0, 30, device="cuda").expand(rows, 30))
    return logits.to(dtype)


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def measure(kind: str, rows: int, options: argparse.Namespace) -> float:
    logits = make_logits(rows, options.vocab, getattr(torch, options.dtype), kind.startswith("flat"))
    width = min(ROWS_A_REQUEST, rows)
    requests = rows // width
    records = [sampling.pack_params(KINDS[kind], seed, 0, 10) for seed in range(requests)]
    params = torch.tensor(records, dtype=torch.int32, device="cuda")
    slots = torch.arange(requests, device="cuda")
    of_rows, output_positions = slots.repeat_interleave(width), torch.arange(width, device="cuda").repeat(requests)
    drafted = torch.zeros(requests, width - 1, dtype=torch.int64, device="cuda")
    num_rows = torch.full((requests,), width, device="cuda")
    positions = torch.full((requests,), 20, dtype=torch.int32, device="cuda")
    last = torch.zeros(requests, 2, dtype=torch.int32, device="cuda")
    draw, judge = sampling.draw_rows, sampling.judge
    if options.plain:
        draw, judge = sampling.plain_draw_rows, sampling.plain_judge

    def step() -> Tensor:
        drawn = draw(logits, of_rows, output_positions, params)
        return judge(drawn.view(requests, width), drafted, num_rows, slots, positions, last, params)

    work = step if options.plain else graph_of(step).replay
    return microseconds(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 64, 256, 1024])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    speed = copy_speed()
    print(
        f"{torch.cuda.get_device_name()}, {options.dtype}, V={options.vocab}, copy {speed / 1e6:.2f} TB/s; microseconds"
    )
    print(f"{'rows':>22}" + "".join(f"{rows:>10}" for rows in options.rows))
    size = getattr(torch, options.dtype).itemsize
    floors = [rows * options.vocab * size / speed for rows in options.rows]
    print(f"{'floor':>22}" + "".join(f"{floor:>10.1f}" for floor in floors))
    report = {"floor": floors}
    for kind in KINDS:
        report[kind] = [measure(kind, rows, options) for rows in options.rows]
        print(f"{kind:>22}" + "".join(f"{time:>10.1f}" for time in report[kind]))
    print(json.dumps({"rows": options.rows, "vocab": options.vocab, "dtype": options.dtype, "us": report}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
