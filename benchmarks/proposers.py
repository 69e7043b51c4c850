"""What the host-side proposers cost, and what they bring on texts of a file.

    python benchmarks/proposers.py [--quick] [--texts question.jsonl]

Cost: microseconds a token to index a prompt that arrives in chunks of 512; microseconds for a proposal with one new
token before it, all of `propose` included; bytes of state a token. Over history lengths and kinds of text, made from a
seed: `words` (common and rare ones, with earlier passages repeated), `letters` (four, at random), `run` (one token),
`block` (300 tokens, repeated), `zigzag` (made to cost n-gram lookup most).

Then the same for a request beside a cache of ended answers: tokens cached, microseconds to enter one of them, for a
proposal, and bytes of the cache a token.

Benefit, with --texts (lines of JSON with "category" and "turns", as Spec-Bench's): tokens emitted a step and accepted
per drafted token if each text, cut into words, were what a target says. No model is involved.

Times are CPU time of the thread, so that neighbours on the machine count little. Medians, with the 10th and 90th
percentile. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from forerun.engine.plan import Plan, ScheduledRequest
from forerun.request import Request, SamplingParams
from forerun.spec.proposer import DraftInputs, Grant
from forerun.spec.proposers.history import HistoryProposer
from forerun.spec.proposers.ngram import NgramProposer
from forerun.spec.proposers.ngram_mod import NgramModProposer
from forerun.spec.proposers.suffix import SuffixProposer
from forerun.spec.verifier import Verdict

CHUNK = 512
ANSWER = 500  # tokens of an ended answer
PROPOSERS: dict[str, Callable[[], HistoryProposer]] = {
    "ngram 5-5 K5": lambda: NgramProposer(5, 5, 5),
    "ngram 2-5 K5": lambda: NgramProposer(2, 5, 5),
    "ngram 1-1024 K5": lambda: NgramProposer(1, 1024, 5),
    "ngram_mod 24-gram K64": lambda: NgramModProposer(24, 48, 16 << 20, 64),
    "suffix depth 24 K24": lambda: SuffixProposer(24, 1.0, 0.1, 24),
    "suffix depth 64 K64": lambda: SuffixProposer(64, 1.0, 0.1, 64),
    "suffix depth 128 K128": lambda: SuffixProposer(128, 1.0, 0.1, 128),
}


def words(size: int, rng: random.Random) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < size:
        tokens.extend(min(int(rng.paretovariate(0.6)), 32_000) for _ in range(rng.randrange(5, 60)))
        start = rng.randrange(len(tokens))
        tokens.extend(tokens[start : start + rng.randrange(30)])
    return tokens[:size]


def zigzag(size: int, rng: random.Random) -> list[int]:
    """Each run of one token follows a token that lies between those of all runs before: the worst for `NgramIndex`."""
    tokens: list[int] = []
    for i in range(size // 200 + 1):
        tokens += [30_000 - i if i % 2 else i, *[20_000] * 199]
    return tokens[:size]


TEXTS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "words": words,
    "letters": lambda size, rng: [rng.randrange(4) for _ in range(size)],
    "run": lambda size, rng: [7] * size,
    "block": lambda size, rng: ([rng.randrange(1000) for _ in range(300)] * (size // 300 + 1))[:size],
    "zigzag": zigzag,
}


def spread(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": round(statistics.median(values), 2), "p10": round(cuts[0], 2), "p90": round(cuts[-1], 2)}


def show(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['p10']:.2f}-{values['p90']:.2f})"


def new_request(tokens: Sequence[int]) -> Request:
    return Request("r", list(tokens), len(tokens), SamplingParams(), seed=0)


def index_prompt(proposer: HistoryProposer, request: Request) -> list[float]:
    """Seconds of each chunk."""
    seconds = []
    for start in range(0, request.num_tokens, CHUNK):
        plan = Plan([ScheduledRequest(request, start, min(CHUNK, request.num_tokens - start))])
        began = time.thread_time()
        proposer.observe(plan, Verdict(), None)
        seconds.append(time.thread_time() - began)
    return seconds


def measure(make: Callable[[], HistoryProposer], tokens: list[int], repeats: int, proposals: int) -> dict[str, Any]:
    """Index all but the last `proposals` tokens several times, then propose before each of those."""
    prompt, rest = tokens[:-proposals], tokens[-proposals:]
    indexing = []
    slowest_chunk = 0.0
    for _ in range(repeats):
        proposer, request = make(), new_request(prompt)
        seconds = index_prompt(proposer, request)
        indexing.append(1e6 * sum(seconds) / len(prompt))
        slowest_chunk = max(slowest_chunk, *seconds)
    state_bytes = proposer.state_bytes
    return {
        "index_us_per_token": spread(indexing),
        "slowest_chunk_ms": round(1e3 * slowest_chunk, 2),
        "proposal_us": spread(propose_timed(proposer, request, rest)),
        "bytes_per_token": round(state_bytes / len(prompt), 1),
    }


def propose_timed(proposer: HistoryProposer, request: Request, rest: Iterable[int]) -> list[float]:
    """Microseconds of a proposal after each further token."""
    took = []
    for token in rest:
        request.token_ids.append(token)
        inputs, grant = DraftInputs([request]), Grant([request], {"r": proposer.num_speculative_tokens})
        began = time.thread_time()
        proposer.propose(inputs, grant)
        took.append(1e6 * (time.thread_time() - began))
    return took


def decode(proposer: HistoryProposer, tokens: list[int]) -> tuple[int, int, int]:
    """Steps, drafted and accepted tokens if a target said `tokens` from the second one on."""
    request = new_request(tokens[:1])
    steps = drafted = accepted = 0
    while (known := request.num_tokens) < len(tokens):
        grant = Grant([request], {"r": min(proposer.num_speculative_tokens, len(tokens) - known - 1)})
        draft = proposer.propose(DraftInputs([request]), grant).of("r").tokens
        right = 0
        while right < len(draft) and draft[right] == tokens[known + right]:
            right += 1
        request.token_ids.extend(tokens[known : known + right + 1])
        steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + right
    proposer.forget("r")
    return steps, drafted, accepted


def texts_by_kind(lines: Iterable[str]) -> dict[str, list[list[int]]]:
    ids: dict[str, int] = {}
    kinds: dict[str, list[list[int]]] = {}
    for line in lines:
        entry = json.loads(line)
        pieces = re.findall(r" ?\w+|\s+|[^\w\s]", "\n".join(entry["turns"]))
        kinds.setdefault(entry["category"], []).append([ids.setdefault(piece, len(ids)) for piece in pieces])
    return kinds


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.machine()} x {os.cpu_count()}"


def cost_table(sizes: Sequence[int], repeats: int, proposals: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    head = ("text", "proposer", "tokens", "index us/token", "chunk ms", "proposal us", "bytes/token")
    layout = "{:8} {:22} {:>7} {:>20} {:>9} {:>22} {:>12}"
    print(layout.format(*head))
    for text, make_text in TEXTS.items():
        for name, make in PROPOSERS.items():
            for size in sizes:
                found = measure(make, make_text(size + proposals, random.Random(seed)), repeats, proposals)
                rows.append({"text": text, "proposer": name, "tokens": size, **found})
                index, proposal = show(found["index_us_per_token"]), show(found["proposal_us"])
                chunk, held = found["slowest_chunk_ms"], found["bytes_per_token"]
                print(layout.format(text, name, size, index, chunk, proposal, held), flush=True)
    return rows


def cached_table(sizes: Sequence[int], proposals: int, seed: int) -> list[dict[str, Any]]:
    """Suffix decoding of a request that repeats what earlier ones were answered, and that it has said itself."""
    rows = []
    layout = "{:8} {:22} {:>9} {:>20} {:>22} {:>12}"
    print("\n" + layout.format("text", "proposer", "cached", "enter us/token", "proposal us", "bytes/token"))
    for text, make_text in TEXTS.items():
        for depth in (24, 64):
            for size in sizes:
                tokens = make_text(size, random.Random(seed))
                proposer = SuffixProposer(depth, 1.0, 0.1, depth, size // ANSWER, 1 << 30)
                entering = []
                for start in range(0, size, ANSWER):
                    proposer.cache.add("", tokens[start : start + ANSWER])
                    began = time.thread_time()
                    proposer.cache.enter(ANSWER)
                    entering.append(1e6 * (time.thread_time() - began) / ANSWER)
                start = random.Random(seed).randrange(size - proposals)
                rest = tokens[start : start + proposals]
                request = new_request(make_text(1000, random.Random(seed + 1)))
                index_prompt(proposer, request)
                row = {
                    "text": text,
                    "proposer": f"suffix depth {depth} K{depth}",
                    "cached": size,
                    "enter_us_per_token": spread(entering),
                    "proposal_us": spread(propose_timed(proposer, request, rest)),
                    "bytes_per_token": round(proposer.cache.num_bytes / size, 1),
                }
                rows.append(row)
                times = show(row["enter_us_per_token"]), show(row["proposal_us"])
                print(layout.format(text, row["proposer"], size, *times, row["bytes_per_token"]), flush=True)
    return rows


def benefit_table(path: Path) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{'kind':16} {'proposer':22} {'tokens':>7} {'tokens/step':>11} {'accepted/drafted':>17}")
    with path.open(encoding="utf-8") as lines:
        kinds = texts_by_kind(lines)
    for kind, texts in kinds.items():
        for name, make in PROPOSERS.items():
            proposer = make()
            steps, drafted, accepted = (
                sum(column) for column in zip(*(decode(proposer, t) for t in texts), strict=True)
            )
            tokens = steps + accepted
            row = {
                "kind": kind,
                "proposer": name,
                "tokens": tokens,
                "tokens_per_step": round(tokens / max(1, steps), 4),
                "acceptance_rate": round(accepted / max(1, drafted), 4),
            }
            rows.append(row)
            print(f"{kind:16} {name:22} {tokens:7} {row['tokens_per_step']:11.3f} {row['acceptance_rate']:17.3f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 8_000, 64_000], help="history lengths, tokens")
    parser.add_argument("--cached", type=int, nargs="+", default=[10_000, 1_000_000], help="tokens of ended answers")
    parser.add_argument("--repeats", type=int, default=7, help="times each history is indexed")
    parser.add_argument("--proposals", type=int, default=300, help="proposals timed at each length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=Path, help="lines of JSON with category and turns: measure the benefit too")
    parser.add_argument("--quick", action="store_true", help="short histories and few repeats, to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.cached, args.repeats, args.proposals = [1_000, 4_000], [4_000], 2, 50
    about = {
        "benchmark": "proposers",
        "commit": commit(),
        "machine": processor(),
        "python": platform.python_version(),
        "repeats": args.repeats,
        "proposals": args.proposals,
        "seed": args.seed,
    }
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    cost = cost_table(args.sizes, args.repeats, args.proposals, args.seed)
    cached = cached_table(args.cached, args.proposals, args.seed)
    benefit = benefit_table(args.texts) if args.texts else []
    print(json.dumps({**about, "cost": cost, "cached": cached, "benefit": benefit}))


if __name__ == "__main__":
    main()
