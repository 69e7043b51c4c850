"""What penalties cost: the time of an engine step with them and without, in turns.

    python benchmarks/penalties.py [MODEL] [--batch-sizes 1 8 32] [--rounds 5] [--steps 4] [--context 256] [--threads 2]

Greedy requests with presence, frequency and repetition penalties, or with none. Drafts are of 0 and of 5 tokens a step,
copied from the prompt as n-gram drafting would, but as many whatever the text is: both sides compute the same rows.
Each figure is a median over the steps of all rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from forerun import LLM, SamplingParams
from forerun.engine.messages import NewRequest
from forerun.request import Request
from forerun.spec.control import FixedLength
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer

DRAFTS = (0, 5)
WARM_UPS = 2
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}


def copied(request: Request, count: int) -> RequestDraft:
    start = request.num_output_tokens % (request.num_prompt_tokens - count)
    return RequestDraft(request.token_ids[start : start + count])


def step_times(llm: LLM, batch_size: int, context: int, steps: int, penalties: dict[str, Any]) -> list[float]:
    """Seconds of each of some steps in which all requests decode."""
    engine, rng = llm.engine, random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, **penalties)
    for place in range(batch_size):
        prompt = rng.choices(range(llm.info.vocab_size), k=context)
        engine.add_request(NewRequest(f"r{place}", prompt, params, 0))
    while len(engine.scheduler.decoding) < batch_size:
        engine.step()
    times = []
    for _ in range(WARM_UPS + steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    engine.abort_requests([f"r{place}" for place in range(batch_size)])
    return times[WARM_UPS:]


def compare(llm: LLM, batch_size: int, num_drafted: int, options: argparse.Namespace) -> dict[str, Any]:
    llm.engine.control = FixedLength(num_drafted)
    without: list[float] = []
    with_them: list[float] = []
    for _ in range(options.rounds):
        for times, penalties in ((without, {}), (with_them, PENALTIES)):
            times += step_times(llm, batch_size, options.context, options.steps, penalties)
    plain, penalised = (1e3 * statistics.median(times) for times in (without, with_them))
    spread = (max(without) - min(without)) * 1e3
    return {
        "batch_size": batch_size,
        "drafted": num_drafted,
        "without_ms": round(plain, 2),
        "with_ms": round(penalised, 2),
        "ratio": round(penalised / plain, 3),
        "spread_without_ms": round(spread, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rows = max(options.batch_sizes) * (1 + max(DRAFTS))
    llm = LLM(options.model, num_threads=options.threads, max_num_batched_tokens=max(512, rows))
    proposer = ScriptedProposer(copied)
    llm.engine.proposer = proposer  # type: ignore[assignment]
    llm.engine.scheduler.on_release = proposer.forget
    results = []
    for batch_size in options.batch_sizes:
        for num_drafted in DRAFTS:
            results.append(compare(llm, batch_size, num_drafted, options))
            print(results[-1], flush=True)
    print(json.dumps({"model": options.model, "context": options.context, "results": results}))


if __name__ == "__main__":
    main()
