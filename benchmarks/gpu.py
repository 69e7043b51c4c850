"""forerun on a GPU, built, checked and timed in one go: a model of Qwen3-8B's shapes with random weights in bfloat16.

    python benchmarks/gpu.py [--parts PART ...] [--batch 1 4 16 64 128 256] [--json FILE] [--markdown FILE]

- `check`: the tests marked `gpu`; where bf16 texts differ from the CPU's. The exit status is 1 where they fail;
- `startup`: a fresh process, from its start to an answer of one token, plain and with an EAGLE-3 head;
- `plain`: decoding, milliseconds a token and request by batch size, and tokens/s;
- `verify`: a step that verifies 3 wrong drafted tokens of each request beside a plain one, in turns;
- `pass`: the target's pass without the engine, its products alone, and what they cannot be faster than;
- `eagle3`: decoding with an EAGLE-3 head, K = 3, drafts that are accepted by chance, 2.4 tokens a step on average;
- `profile`: kernels of a plain step at the smallest and the largest batch and of an EAGLE-3 step at the smallest, and
  the time in which none runs;
- `peers` (only when asked for): transformers' compiled generate, and vLLM where it is installed.

Prompts are random tokens, greedy, end tokens ignored. Figures are medians, with the lowest and the highest in brackets.
A floor is what the device itself takes: weights and the context's keys and values read once at the speed of a device
copy, or the products at that of a large one, measured in the same run. Rows are printed, and files written, as they are
measured. `--device cpu --shapes tiny` tries the script out where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `tests`

import torch
from gpu_parts.checks import check, start, startup
from gpu_parts.floors import measure_speeds
from gpu_parts.models import TARGETS, Models, release_memory
from gpu_parts.options import Options
from gpu_parts.peer_engines import PEERS, peers, time_transformers, time_vllm
from gpu_parts.report import Report
from gpu_parts.timings import Timings
from proposers import commit, processor

from forerun.engine.engine import Engine

PARTS = ("check", "startup", "plain", "verify", "pass", "eagle3", "profile", "peers")
CHILDREN: dict[str, Callable[[Options, Path], None]] = {
    "startup-plain": partial(start, "plain"),
    "startup-eagle3": partial(start, "eagle3"),
    "transformers": time_transformers,
    "vllm-plain": partial(time_vllm, "plain"),
    "vllm-eagle3": partial(time_vllm, "eagle3"),
}


class Run:
    """One go through the parts. A part that fails is reported, and the next begins."""

    def __init__(
        self, parts: Sequence[str], peers: Sequence[str], options: Options, report: Report, folder: Path
    ) -> None:
        self.parts = parts
        self.peers = peers
        self.options = options
        self.report = report
        self.folder = folder
        self.models = Models(options, folder)

    def all(self) -> None:
        if {"startup", "eagle3", "profile", "peers"} & set(self.parts):
            self.models.save_head()
            release_memory()
        self.alone({"check": partial(check, self.report, self.options)})
        self.alone({"startup": partial(startup, self.report, self.options, self.folder)})
        ends = sorted({self.options.batch[0], self.options.batch[-1]})
        self.with_engine("plain", {"plain": self._decode("plain"), "profile": self._profile("plain", ends)})
        self.with_engine("scripted", {"verify": self._verify, "pass": self._pass})
        self.with_engine("eagle3", {"eagle3": self._decode("eagle3"), "profile": self._profile("eagle3", ends[:1])})
        self.models.forget()
        release_memory()
        self.alone({"peers": partial(peers, self.report, self.options, self.folder, self.peers)})

    @cached_property
    def timings(self) -> Timings:
        speeds = measure_speeds(self.options.device)
        release_memory()
        self.report.learn(copy_tb_per_s=round(speeds.bytes / 1e12, 3), matmul_tflops=round(speeds.flops / 1e12, 1))
        return Timings(self.options, self.report, self.models, speeds)

    def alone(self, parts: dict[str, Callable[[], None]]) -> None:
        for name, part in parts.items():
            if name in self.parts:
                self._guarded(name, part)

    def with_engine(self, kind: str, parts: dict[str, Callable[[Engine], None]]) -> None:
        """Parts that share an engine, which then gives its memory back."""
        wanted = {name: part for name, part in parts.items() if name in self.parts}

        def run() -> None:
            engine = self.models.engine(kind)
            for name, part in wanted.items():
                self._guarded(f"{name} ({kind})", partial(part, engine))

        if wanted:
            self._guarded(f"{kind} engine", run)
            release_memory()

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.report.fail(f"{name}: {type(error).__name__}: {error}")

    def _decode(self, part: str) -> Callable[[Engine], None]:
        return lambda engine: self.timings.decode(engine, part)

    def _profile(self, kind: str, sizes: Sequence[int]) -> Callable[[Engine], None]:
        return lambda engine: self.timings.profile(engine, kind, sizes)

    def _verify(self, engine: Engine) -> None:
        self.timings.verify(engine)

    def _pass(self, engine: Engine) -> None:
        self.timings.passes(engine)


def about(options: Options) -> dict[str, Any]:
    cuda = options.device == "cuda"
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "triton": installed("triton"),
        "shapes": options.shapes + (f", {options.layers} layers" if options.layers else ""),
        "prompt": options.prompt,
        "steps": options.steps,
        "rounds": options.rounds,
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256], help="numbers of requests")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=96, help="timed in a round")
    parser.add_argument("--rounds", type=int, default=2, help="new batches for each figure of plain and eagle3")
    parser.add_argument("--layers", type=int, default=0, help="of the target, where not all are wanted")
    parser.add_argument("--shapes", choices=TARGETS, default="qwen3-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables there, for docs/measurements.md"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)  # kind, options, folder: see gpu_parts/children.py
    args = parser.parse_args(words)
    if args.device == "cuda" and not args.child and not torch.cuda.is_available():
        parser.error("no usable GPU: --device cpu --shapes tiny tries the script out without one")
    for name in ("prompt", "steps", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if min(args.batch) < 1:
        parser.error(f"--batch must hold numbers of at least 1, got {min(args.batch)}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = parse(words)
    if args.child:
        kind, settings, folder = args.child
        CHILDREN[kind](Options(**json.loads(settings)), Path(folder))
        return 0
    batch = tuple(sorted(set(args.batch)))
    options = Options(batch, args.prompt, args.steps, args.rounds, args.shapes, args.layers, args.device)
    report = Report(about(options), args.json, args.markdown)
    with tempfile.TemporaryDirectory() as folder:
        Run(args.parts, args.peers, options, report, Path(folder)).all()
    report.end()
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
