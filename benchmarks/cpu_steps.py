"""How long a step of a whole model takes on the CPU extension, by rows; and how far packed weights are from the same
file dequantised to float32.

    python benchmarks/cpu_steps.py MODEL [--threads 1 2] [--rows 1 4 8] [--prefill 512] [--context 256]
                                    [--kv-cache-dtype bfloat16] [--compare]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from forerun.attention import AttentionBackend, QueryTile, StepLayout
from forerun.attention.native import NativeAttention
from forerun.attention.reference import ReferenceAttention
from forerun.engine.build import KV_DTYPES
from forerun.kernels import native
from forerun.models.decoder import Decoder, attention_spec
from forerun.models.loading import load_model

BLOCK = 16


def backend_for(model: Decoder, num_keys: int, reference: bool, dtype: torch.dtype) -> AttentionBackend:
    spec = attention_spec(model.config, BLOCK)
    num_blocks = -(-num_keys // BLOCK)
    pool = torch.zeros(num_blocks * spec.shape.block_bytes(dtype.itemsize), dtype=torch.uint8)
    return (ReferenceAttention if reference else NativeAttention)(spec, pool, dtype)


@torch.inference_mode()
def step(model: Decoder, attention: AttentionBackend, tokens: Tensor, start: int, last_only: bool = True) -> Tensor:
    """One pass over tokens at positions start.. of one sequence in blocks 0.. -> logits."""
    count = len(tokens)
    table = list(range(-(-(start + count) // BLOCK)))
    size = attention.row_tile
    tiles = [QueryTile(range(first, min(first + size, count)), start + first, table) for first in range(0, count, size)]
    positions = torch.arange(start, start + count)
    attention.begin(StepLayout(positions, tiles))
    hidden = model.forward(tokens, positions, attention.attend).hidden
    return model.logits(hidden[-1:] if last_only else hidden)


@dataclass(frozen=True)
class Timing:
    """Milliseconds: of the clock, median and least, and of processor time in all threads, which other processes on the
    machine disturb less."""

    median: float
    least: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ms (least {self.least:.2f}; processor time {self.cpu:.2f})"


def time_ms(run: Callable[[], object], repeats: int) -> Timing:
    """Of the repeats, after one that is not counted."""
    run()
    times, cpu_times = [], []
    for _ in range(repeats):
        started, cpu_started = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - started) * 1e3)
        cpu_times.append((time.process_time() - cpu_started) * 1e3)
    return Timing(*(round(x, 2) for x in (statistics.median(times), min(times), statistics.median(cpu_times))))


def tokens_of(model: Decoder, count: int) -> Tensor:
    return torch.randint(100, model.config.vocab_size - 200, (count,), generator=torch.Generator().manual_seed(0))


def kl_divergence(wide: Tensor, narrow: Tensor) -> Tensor:
    """KL(wide || narrow) a row, in nats."""
    p, q = wide.double().log_softmax(-1), narrow.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def compare(path: str, model: Decoder, tokens: Tensor) -> dict[str, float]:
    wide = load_model(path)
    expected = step(wide, backend_for(wide, len(tokens), True, torch.float32), tokens, 0, last_only=False)
    got = step(model, backend_for(model, len(tokens), False, torch.float32), tokens, 0, last_only=False)
    narrow = step(model, backend_for(model, len(tokens), False, torch.bfloat16), tokens, 0, last_only=False)
    return {
        "kl_mean": kl_divergence(expected, got).mean().item(),
        "kl_max": kl_divergence(expected, got).max().item(),
        "same_top": (expected.argmax(-1) == got.argmax(-1)).double().mean().item(),
        "kl_mean_bf16_cache": kl_divergence(expected, narrow).mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--text", help="a file whose tokens the comparison takes; needs the model's tokenizer")
    parser.add_argument("--compare", action="store_true", help="KL divergence from the file in float32")
    args = parser.parse_args()
    torch.set_num_threads(max(args.threads))

    started = time.perf_counter()
    model = load_model(args.model, packed=True, max_positions=8192)
    result: dict[str, object] = {"model": args.model, "load_s": round(time.perf_counter() - started, 2)}
    result["weight_mb"] = round(model.weight_bytes / 1e6, 1)
    kv_dtype = KV_DTYPES[args.kv_cache_dtype]
    result["kv_cache_dtype"] = str(kv_dtype)
    attention = backend_for(model, args.context + args.prefill + max(args.rows), False, kv_dtype)
    with native.use(isa=args.isa):
        result["isa"] = native.isa()
        step(model, attention, tokens_of(model, args.context), 0)
        for threads in args.threads:
            native.set_num_threads(threads)
            for rows in args.rows:
                tokens = tokens_of(model, rows)
                timing = time_ms(
                    lambda tokens=tokens: step(model, attention, tokens, args.context, last_only=False), args.repeats
                )
                print(f"{threads} threads, {rows} rows: {timing}", flush=True)
                result[f"{rows}_rows_{threads}_threads"] = asdict(timing)
            if args.prefill:
                tokens = tokens_of(model, args.prefill)
                timing = time_ms(lambda tokens=tokens: step(model, attention, tokens, 0), 3)
                print(f"{threads} threads, prefill of {args.prefill}: {timing}", flush=True)
                result[f"prefill_{args.prefill}_{threads}_threads"] = asdict(timing)
    if args.compare:
        tokens = tokens_of(model, 128)
        if args.text:
            from forerun.models.tokenizer import load_tokenizer

            with open(args.text) as file:
                tokens = torch.tensor(load_tokenizer(args.model, None).encode(file.read())[:256])
        result |= compare(args.model, model, tokens)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
