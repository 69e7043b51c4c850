"""What a step costs on a GPU, beside its floors: a model of Qwen3-8B's shapes with random weights in bfloat16.

    python benchmarks/gpu_steps.py [--batch 1 4 16 64] [--prompt 1000] [--steps 64] [--layers 36] [--json FILE]

Prints milliseconds a step: of the engine (what a user waits for), of the recorded pass alone (GPU), for 1 row and for 4
rows a request; of the linear layers alone in a graph, and of reading the weights once at the speed of a device copy.
Then the kernels that take the most time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.attention import Segment
from forerun.engine import build
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.kernels.fused import PlainLinear
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.graphs import GraphedModel
from forerun.request import Request, SamplingParams
from forerun.spec.config import SpeculativeConfig
from forerun.spec.control import FixedLength
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer
from tests.tiny_tokenizer import save_tiny_tokenizer

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DRAFTED = 3


def random_model(config: DecoderConfig, max_positions: int | None = None) -> Decoder:
    generator = torch.Generator(device="cuda").manual_seed(0)
    weights = {}
    for name, shape in config.weight_shapes().items():
        weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        weights[name] = weight.normal_(0, 0.02, generator=generator) if len(shape) > 1 else weight.fill_(1)
    return Decoder(config, weights, max_positions)


def make_engine(args: argparse.Namespace, folder: Path) -> Engine:
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | {"num_hidden_layers": args.layers}))
    save_tiny_tokenizer(folder)
    build.load_model = lambda path, dtype, max_positions, **_: random_model(build.read_config(path), max_positions)
    spec = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": DRAFTED})
    engine = build.build_engine(
        EngineConfig(
            model=str(folder),
            device="cuda",
            speculative_config=spec,
            max_model_len=4096,
            max_num_seqs=max(args.batch),
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
        )
    )
    engine.proposer = ScriptedProposer(wrong_draft)
    for line in engine.info().log_lines:
        print(line)
    return engine


def wrong_draft(request: Request, length: int) -> RequestDraft:
    """Tokens that never stand, so that each step verifies them and emits one."""
    return RequestDraft([(request.token_ids[-1] + 1 + i) % 1000 for i in range(length)], "scripted")


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time on the GPU."""
    times = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


def fill(engine: Engine, batch: int, prompt: int, tokens: int) -> None:
    """Requests whose prompts are computed."""
    generator = torch.Generator().manual_seed(batch)
    for place in range(batch):
        ids = torch.randint(1000, 150_000, (prompt,), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.add_request(NewRequest(f"{batch}-{tokens}-{place}", ids, params, 0))
    while len(engine.scheduler.running) < batch or any(r.num_output_tokens == 0 for r in engine.scheduler.running):
        engine.step()


def engine_step(engine: Engine, batch: int, drafted: int, args: argparse.Namespace) -> float:
    """Median milliseconds of a step of a full batch."""
    engine.control = FixedLength(drafted)
    fill(engine, batch, args.prompt, args.steps + batch + 8)
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        engine.step()
        times.append(1000 * (time.perf_counter() - started))
    engine.abort_requests([request.request_id for request in list(engine.scheduler.running)])
    return statistics.median(times[4:])


def pass_time(engine: Engine, batch: int, rows: int, prompt: int) -> float:
    target = engine.runner.target
    assert isinstance(target, GraphedModel)
    size = target.block_size
    count = -(-(prompt + rows) // size)
    segments = [Segment([7] * rows, prompt, list(range(i * count, (i + 1) * count))) for i in range(batch)]
    return milliseconds(lambda: target.logits(target.forward(segments), range(batch * rows)))


def linears_time(model: Decoder, rows: int) -> float:
    """All products of a pass, one after another in a graph."""
    linears = [linear for linear in model.linears if isinstance(linear, PlainLinear)]
    inputs = {k: torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for k in {lin.shape[1] for lin in linears}}

    def run() -> None:
        for linear in linears:
            linear(inputs[linear.shape[1]])

    with torch.inference_mode():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return milliseconds(graph.replay)


def copy_speed() -> float:
    """Bytes read and written a second by a device copy."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1000


def profile(engine: Engine, batch: int, args: argparse.Namespace) -> list[tuple[str, float]]:
    """(kernel, milliseconds a step) of plain steps, the longest first."""
    engine.control = FixedLength(0)
    fill(engine, batch, args.prompt, 40)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(8):
            engine.step()
    engine.abort_requests([request.request_id for request in list(engine.scheduler.running)])
    kernels = [(event.key, event.self_device_time_total / 8000) for event in profiler.key_averages()]
    return sorted((k for k in kernels if k[1] > 0), key=lambda kernel: -kernel[1])[:12]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(args, Path(folder))
    start_s = time.perf_counter() - started
    model = engine.runner.target.model
    assert isinstance(model, Decoder)
    speed = copy_speed()
    floor = 1000 * model.weight_bytes / speed
    print(f"start-up {start_s:.1f} s; device copy {speed / 1e12:.2f} TB/s; weights once {floor:.2f} ms")
    header = (
        "batch",
        "step",
        "step of 4 rows",
        "ratio",
        "pass",
        "pass of 4 rows",
        "ratio",
        "linears",
        "linears of 4 rows",
    )
    print(" | ".join(header))
    rows = []
    for batch in args.batch:
        step, wide = (engine_step(engine, batch, drafted, args) for drafted in (0, DRAFTED))
        one, four = (pass_time(engine, batch, count, args.prompt) for count in (1, 1 + DRAFTED))
        products = linears_time(model, batch), linears_time(model, 4 * batch)
        rows.append((batch, step, wide, wide / step, one, four, four / one, *products))
        print(" | ".join([str(batch), *(f"{value:.2f}" for value in rows[-1][1:])]), flush=True)
    prompts = max(args.batch)
    engine.control = FixedLength(0)
    started = time.perf_counter()
    fill(engine, prompts, args.prompt, prompts + 2)
    prefill = prompts * args.prompt / (time.perf_counter() - started)
    engine.abort_requests([request.request_id for request in list(engine.scheduler.running)])
    print(f"prompts: {prefill:,.0f} tokens/s, {prompts} of {args.prompt} tokens in steps of 8192")
    profiles = {batch: profile(engine, batch, args) for batch in (args.batch[0], args.batch[-1])}
    for batch, kernels in profiles.items():
        print(f"kernels of a plain step, batch {batch}, ms:")
        for name, ms in kernels:
            print(f"  {ms:7.3f}  {name[:100]}")
    if args.json:
        result = {"start_s": start_s, "copy_bytes_per_s": speed, "weights_ms": floor, "prompt_tokens_per_s": prefill}
        args.json.write_text(json.dumps(result | {"columns": header, "rows": rows, "kernels": profiles}))


if __name__ == "__main__":
    main()
