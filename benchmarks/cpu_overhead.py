"""What a step costs outside the CPU extension: Python, torch's small operations, the engine's own work.

    python benchmarks/cpu_overhead.py MODEL [--steps 200] [--threads 2]

One greedy request at a time, drafts of 0 and of 7 tokens a step. Steps are timed as they are, and again with every call
into the extension replaced by one that returns at once (tokens are noise then, which costs the same): the second is the
overhead. Median over steps; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from peers import ours
from proposers import commit, processor

from forerun import LLM, SamplingParams
from forerun.attention.native import NativeAttention
from forerun.engine.messages import NewRequest
from forerun.kernels import native
from forerun.kernels.packed import PackedLinear
from forerun.models.decoder import Decoder
from forerun.request import Request
from forerun.spec.control import FixedLength
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer

CONTEXT = 64
DRAFTS = (0, 7)
WARM_UPS = 10


class Nothing:
    """In the extension's place: any function, any arguments, no work."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@contextmanager
def without_extension(llm: LLM) -> Iterator[None]:
    runner = llm.engine.runner
    assert isinstance(runner.model, Decoder)
    assert isinstance(runner.attention, NativeAttention)
    owners = [runner.attention, *(linear for linear in runner.model.linears if isinstance(linear, PackedLinear))]
    held = [owner._native for owner in owners]
    nothing = Nothing()
    try:
        for owner in owners:
            owner._native = nothing
        with mock.patch.object(native, "_native", nothing):
            yield
    finally:
        for owner, real in zip(owners, held, strict=True):
            owner._native = real


def step_ms(llm: LLM, num_drafted: int, steps: int) -> float:
    """Milliseconds of an engine step: median."""
    engine, rng = llm.engine, random.Random(0)
    vocab = engine.info().vocab_size

    def draft(request: Request, count: int) -> RequestDraft:
        return RequestDraft(rng.choices(range(vocab), k=count))

    engine.proposer = ScriptedProposer(draft)
    engine.scheduler.on_release = engine.proposer.forget
    engine.control = FixedLength(num_drafted)
    params = SamplingParams(temperature=0, max_tokens=8 * (steps + WARM_UPS), ignore_eos=True)
    engine.add_request(NewRequest("probe", rng.choices(range(vocab), k=CONTEXT), params, 0))
    times = []
    for _ in range(WARM_UPS + steps):
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    engine.abort_requests(["probe"])
    return round(statistics.median(times[WARM_UPS:]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=native.num_threads())
    options = parser.parse_args()
    llm = ours.load(options.model, options.threads, CONTEXT + 8 * (options.steps + WARM_UPS) + 16, 512)
    found = {}
    for num_drafted in DRAFTS:
        whole = step_ms(llm, num_drafted, options.steps)
        with without_extension(llm):
            outside = step_ms(llm, num_drafted, options.steps)
        print(f"{1 + num_drafted} rows: a step of {whole} ms, of which {outside} ms outside the extension")
        found[f"{1 + num_drafted}_rows"] = {"step_ms": whole, "outside_ms": outside}
    about = {"benchmark": "cpu_overhead", "commit": commit(), "machine": processor(), "threads": options.threads}
    print(json.dumps(about | {"model": options.model.name, "results": found}))


if __name__ == "__main__":
    main()
