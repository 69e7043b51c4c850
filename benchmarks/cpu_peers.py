"""forerun and llama.cpp on this CPU, in turns, in one run.

    python benchmarks/cpu_peers.py --llama-cpp BUILD/bin --models model-q4_0.gguf model-q8_0.gguf \\
        --dataset question.jsonl [--rounds 3] [--plot peers.svg]
    python benchmarks/cpu_peers.py --join FIRST SECOND ... [--plot peers.svg]

The second form shows what earlier runs wrote to files, as one. For each GGUF file, both sides on the same file with the
same threads:

- `step`: tokens/s of a step of 1, 4, 8 and 64 rows of one sequence with logits of the last row (llama-bench -p), and
  `prefill`: the same with 512 rows;
- `verify`: the same with logits of all rows, which is what judging a draft takes (llama-batched-bench on their side:
  one row for each sequence);
- `spec`: greedy answers to Spec-Bench's questions, one at a time: plain and with each n-gram method of either side.
  The same token ids go in on both sides. Tokens/s after the first token; accepted / drafted tokens;
- `start`: time from the start of the server's process until it is ready, and its resident memory after one answer.

Sides alternate, and who goes first changes from round to round. Servers start anew in each round, so that none has
seen a question before. Figures are medians over all rounds with the lowest and the highest. "Best" takes, for each
side, the best of its files of one model. A peer's program that is not there is skipped and named. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import llama_cpp, ours
from peers.common import Answer, load_average, rate, spread
from peers.llama_cpp import SPEC_FLAGS, LlamaCpp
from peers.report import plot, show
from proposers import commit, processor
from rich.console import Console

from forerun.bench.datasets import Question, read_questions
from forerun.kernels import native
from forerun.models.loading import read_config

Figures = dict[str, dict[str, Any]]
PARTS = ("step", "prefill", "verify", "spec", "start")
PREFILL_ROWS = 512
PREFILL_REPEATS = 1
WARM_UP_TOKENS = 4
WIDTH = 140  # columns, where the output goes to a file


def main() -> None:
    options = parse()
    report = join(options.join) if options.join else run(options)
    report["best"] = best(report["files"])
    show(Console(width=WIDTH), report)
    if options.plot:
        plot(report, options.plot)
    print(json.dumps(report))


def run(options: argparse.Namespace) -> dict[str, Any]:
    peer = LlamaCpp(options.llama_cpp, options.threads)
    questions = read_questions(options.dataset, options.categories, options.questions) if options.dataset else []
    skipped = [f"llama.cpp's {program}: not in {options.llama_cpp or '(no --llama-cpp)'}" for program in peer.missing]
    skipped += [] if questions else ["part spec: no --dataset"]
    for line in skipped:
        say(f"skipped: {line}")
    report: dict[str, Any] = {**about(options, peer), "skipped": skipped, "files": {}}
    for model in options.models:
        say(f"{model.name}:")
        report["files"][model.name] = {"model": shape(model), **measure(model, peer, questions, options)}
    report["load_average_at_end"] = load_average()
    return report


def join(outputs: Sequence[Path]) -> dict[str, Any]:
    """The reports at the ends of the files as one. What differs between runs is listed; of a part measured twice the
    later one stands."""
    reports = [json.loads(path.read_text().splitlines()[-1]) for path in outputs]
    files: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, figures in report["files"].items():
            files.setdefault(name, {}).update(figures)
    joined = {"files": files}
    for key in (key for key in reports[0] if key not in ("files", "best")):
        values = [report[key] for report in reports]
        joined[key] = values[0] if all(value == values[0] for value in values) else values
    return joined


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--models", type=Path, nargs="+", metavar="FILE", help="GGUF files")
    what.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="outputs of earlier runs")
    parser.add_argument("--dataset", type=Path, metavar="FILE", help="Spec-Bench's question.jsonl")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 64])
    parser.add_argument("--repeats", type=int, default=5, help="steps timed in a round")
    parser.add_argument("--categories", nargs="+", default=["coding", "summarization", "rag"])
    parser.add_argument("--questions", type=int, default=5, help="of each category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=4096, help="tokens that both sides are set up for")
    parser.add_argument("--kv-cache-mib", type=int, default=512, help="forerun's KV cache")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs matplotlib)")
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def about(options: argparse.Namespace, peer: LlamaCpp) -> dict[str, Any]:
    keys = ("rounds", "repeats", "questions", "max_tokens", "context", "threads")
    return {
        "benchmark": "cpu_peers",
        "commit": commit(),
        "machine": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "isa": native.isa() if native.available() else "plain torch",
        "llama_cpp": peer.version,
        "load_average": load_average(),
        **{key: getattr(options, key) for key in keys},
    }


def shape(model: Path) -> str:
    """Files of one shape are one model in several quantisations."""
    config = read_config(model)
    return f"{config.family} {config.num_layers} x {config.hidden_size}"


def measure(model: Path, peer: LlamaCpp, questions: Sequence[Question], options: argparse.Namespace) -> Figures:
    found: Figures = {"file_mib": round(model.stat().st_size / 2**20, 1)}  # type: ignore[dict-item]
    if {"step", "prefill", "verify"} & set(options.parts):
        found |= measure_steps(model, peer, options)
    if "spec" in options.parts and questions:
        found["spec"] = measure_spec(model, peer, questions, options)
    if "start" in options.parts:
        found["start"] = measure_start(model, peer, options)
    return found


def in_turns(rounds: int, sides: dict[str, Callable[[], dict[Any, list[float]]]]) -> dict[str, dict[str, Any]]:
    """Call every side once a round, the last one of a round first in the next; figures by side and key."""
    values: dict[str, dict[str, list[float]]] = {side: defaultdict(list) for side in sides}
    order = list(sides)
    for number in range(rounds):
        for side in order:
            for key, new in sides[side]().items():
                values[side][str(key)] += new
            say(f"  round {number + 1} of {rounds}: {side}")
        order.reverse()
    return {side: {key: spread(all_) for key, all_ in found.items()} for side, found in values.items()}


def measure_steps(model: Path, peer: LlamaCpp, options: argparse.Namespace) -> Figures:
    context = max(1024, 2 * PREFILL_ROWS)
    llm = ours.load(model, options.threads, context, options.kv_cache_mib)
    target = ours.Target(llm)
    rows, repeats = options.rows, options.repeats
    found: Figures = {}
    if "step" in options.parts:
        say(" steps, logits of the last row")
        sides = {"forerun": partial(target.steps, rows, repeats)}
        if peer.has("llama-bench"):
            sides["llama.cpp"] = partial(peer.steps, model, rows, repeats)
        found["step"] = with_ratios(in_turns(options.rounds, sides))
    if "verify" in options.parts:
        say(" steps, logits of all rows")
        sides = {"forerun": partial(target.verify_steps, rows, repeats)}
        if peer.has("llama-batched-bench"):
            sides["llama.cpp"] = partial(peer.verify_steps, model, rows)
        found["verify"] = with_ratios(in_turns(options.rounds, sides))
    if "prefill" in options.parts:
        say(" prefill")
        sides = {"forerun": partial(target.steps, [PREFILL_ROWS], PREFILL_REPEATS)}
        if peer.has("llama-bench"):
            sides["llama.cpp"] = partial(peer.steps, model, [PREFILL_ROWS], PREFILL_REPEATS)
        found["prefill"] = in_turns(options.rounds, sides)
    return found


def with_ratios(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds what a step of n rows costs in steps of 1 row, from the medians."""
    for figures in found.values():
        if "1" in figures:
            alone = figures["1"]["median"]
            figures["cost"] = {
                rows: round(int(rows) * alone / figure["median"], 3) for rows, figure in figures.items() if rows != "1"
            }
    return found


def measure_spec(model: Path, peer: LlamaCpp, questions: Sequence[Question], options: argparse.Namespace) -> Figures:
    say(" Spec-Bench")
    load = partial(ours.load, model, options.threads, options.context, options.kv_cache_mib)
    llms = {method: load(method) for method in ours.METHODS}
    tokenizer = next(iter(llms.values())).tokenizer
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q.text}]) for q in questions]
    fits = [place for place, ids in enumerate(prompts) if len(ids) + options.max_tokens <= options.context]
    if len(fits) < len(prompts):
        say(f"  {len(prompts) - len(fits)} questions are longer than the context and left out")
    answers: dict[str, dict[int, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        with ExitStack() as stack:
            sides = our_sides(llms, options.max_tokens)
            if peer.has("llama-server"):
                sides |= their_sides(stack, model, peer, options)
            for side in sides.values():
                side(prompts[0][:WARM_UP_TOKENS])
            for turn, place in enumerate(fits):
                names = list(sides)
                first = (number + turn) % len(names)
                for name in names[first:] + names[:first]:
                    answers[name][place].append(sides[name](prompts[place]))
                say(f"  round {number + 1} of {options.rounds}: {turn + 1} of {len(fits)} questions")
    return {name: summarise(by_place, questions) for name, by_place in answers.items()}


Side = Callable[[Sequence[int]], Answer]


def our_sides(llms: dict[str, Any], max_tokens: int) -> dict[str, Side]:
    first = next(iter(llms.values()))
    sides: dict[str, Side] = {"forerun plain": partial(ours.answer, first, max_tokens=max_tokens, speculation=False)}
    for method, llm in llms.items():
        sides[f"forerun {method}"] = partial(ours.answer, llm, max_tokens=max_tokens, speculation=True)
    return sides


def their_sides(stack: ExitStack, model: Path, peer: LlamaCpp, options: argparse.Namespace) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    for name, flags in SPEC_FLAGS.items():
        server = stack.enter_context(peer.serve(model, options.context, flags))
        sides[f"llama.cpp {name}"] = partial(llama_cpp.answer, server, max_tokens=options.max_tokens)
    return sides


def summarise(by_place: dict[int, list[Answer]], questions: Sequence[Question]) -> dict[str, Any]:
    """By category and over all: tokens/s of each round over its answers; drafted and accepted tokens of one round."""
    found: dict[str, Any] = {}
    for category in [*dict.fromkeys(questions[place].category for place in by_place), "all"]:
        own = [each for place, each in by_place.items() if category in (questions[place].category, "all")]
        rounds = list(zip(*own, strict=True))
        drafted, accepted = sum(a.num_drafted for a in rounds[0]), sum(a.num_accepted for a in rounds[0])
        found[category] = {
            "tokens_per_s": spread([rate(answers) for answers in rounds]),
            "tokens": sum(a.num_tokens for a in rounds[0]),
            "drafted": drafted,
            "accepted": accepted,
            "acceptance_rate": round(accepted / drafted, 3) if drafted else None,
        }
    return found


def measure_start(model: Path, peer: LlamaCpp, options: argparse.Namespace) -> Figures:
    say(" start-up")

    def our_start() -> dict[str, list[float]]:
        with ours.serve(model, options.threads, options.context, options.kv_cache_mib) as server:
            server.post("/v1/completions", {"model": str(model), "prompt": "Once", "max_tokens": 8, "temperature": 0})
            return started(server)

    def their_start() -> dict[str, list[float]]:
        with peer.serve(model, options.context) as server:
            server.post("/completion", {"prompt": "Once", "n_predict": 8, "temperature": 0})
            return started(server)

    def started(server: Any) -> dict[str, list[float]]:
        return {"ready_s": [server.start_s], **{f"{k}_mib": [v] for k, v in server.memory_mib().items()}}

    sides = {"forerun": our_start}
    if peer.has("llama-server"):
        sides["llama.cpp"] = their_start
    return in_turns(options.rounds, sides)


def best(files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each model and side, the best of its files: tokens/s by rows, prefill, and Spec-Bench over all questions."""
    found: dict[str, dict[str, Any]] = {}
    for name, figures in files.items():
        mine = found.setdefault(figures["model"], {})
        for part in ("step", "verify", "prefill"):
            for side, by_rows in figures.get(part, {}).items():
                for rows, figure in by_rows.items():
                    if rows != "cost":
                        keep_best(mine, f"{part} {rows}", side, figure["median"], name)
        for side, by_category in figures.get("spec", {}).items():
            program, method = side.split(" ", 1)
            for category, figure in by_category.items():
                keep_best(mine, f"spec {category}", program, figure["tokens_per_s"]["median"], f"{name} {method}")
    for mine in found.values():
        for figure in mine.values():
            if len(figure) == 2:
                figure["ratio"] = round(figure["forerun"][0] / figure["llama.cpp"][0], 3)
    return found


def keep_best(found: dict[str, Any], what: str, side: str, value: float, where: str) -> None:
    known = found.setdefault(what, {}).get(side)
    if known is None or value > known[0]:
        found[what][side] = [value, where]


if __name__ == "__main__":
    main()
