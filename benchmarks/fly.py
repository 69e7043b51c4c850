"""What FLy, the lossy rule, brings over `standard`, and how many texts it changes: a real pair, real prompts.

    python benchmarks/fly.py --target target.gguf --draft draft.gguf --dataset question.jsonl \\
        [--num-prompts 16] [--max-tokens 64] [--tokens 8] [--window 4] [--threads 2] [--limit-s 200] [--batch]

One engine runs `fly`; each request asks for `fly` or for `standard` (which is `match` here, as drafts are greedy: its
text is that of plain decoding). Prompts are Spec-Bench's, the same number from each category, answered one at a time;
the two sides take turns, and who is first changes from prompt to prompt. Each prompt is answered greedily, and drawn at
temperature 0.8 with a seed of its own. A text that changed is one with another token anywhere; the place of the first
is given too. A prompt is computed once; speeds are of the tokens after the first. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.datasets import in_turns, spec_bench_questions

RULES = ("standard", "fly")
KINDS = {"greedy": 0.0, "temperature 0.8": 0.8}
Pair = dict[str, dict[str, Any]]  # a prompt's answer under each rule


def main() -> None:
    options = parse()
    llm = LLM(
        str(options.target),
        speculative_config={
            "method": "draft_model",
            "model": str(options.draft),
            "num_speculative_tokens": options.tokens,
            "rejection_sample_method": "fly",
            "fly_window_size": options.window,
        },
        max_model_len=4096,
        num_threads=options.threads,
    )
    prompts = [q.text for q in in_turns(spec_bench_questions(options.dataset), options.num_prompts)]
    found = together(llm, prompts, options) if options.batch else one_by_one(llm, prompts, options)
    report = {kind: figures(pairs) for kind, pairs in found.items()}
    for kind, row in report.items():
        print(f"{kind}: {json.dumps(row)}")
    print(json.dumps({"tokens": options.tokens, "window": options.window} | report))


def one_by_one(llm: LLM, prompts: list[str], options: argparse.Namespace) -> dict[str, list[Pair]]:
    answer(llm, prompts[:1], "standard", temperature=0, seeds=[0], max_tokens=8)  # warm
    found: dict[str, list[Pair]] = {kind: [] for kind in KINDS}
    started = time.perf_counter()
    for place, prompt in enumerate(prompts):
        if time.perf_counter() - started > options.limit_s:
            break
        for kind, temperature in KINDS.items():
            found[kind].append(both(llm, prompt, place, temperature, options.max_tokens))
    return found


def together(llm: LLM, prompts: list[str], options: argparse.Namespace) -> dict[str, list[Pair]]:
    """All prompts at once: the same texts and acceptance, sooner; the speeds say nothing."""
    found: dict[str, list[Pair]] = {}
    seeds = range(len(prompts))
    for kind, temperature in KINDS.items():
        sides = [
            answer(llm, prompts, rule, temperature=temperature, seeds=seeds, max_tokens=options.max_tokens)
            for rule in RULES
        ]
        found[kind] = [dict(zip(RULES, pair, strict=True)) for pair in zip(*sides, strict=True)]
        print(f"{kind}: {json.dumps(figures(found[kind]))}", flush=True)
    return found


def both(llm: LLM, prompt: str, place: int, temperature: float, max_tokens: int) -> Pair:
    """A prompt under both rules, in an order that changes from prompt to prompt."""
    return {
        rule: answer(llm, [prompt], rule, temperature=temperature, seeds=[place], max_tokens=max_tokens)[0]
        for rule in (RULES if place % 2 else reversed(RULES))
    }


def figures(pairs: list[Pair]) -> dict[str, Any]:
    ratios = sorted(pair["fly"]["speed"] / pair["standard"]["speed"] for pair in pairs)
    places = [first_difference(pair["standard"]["token_ids"], pair["fly"]["token_ids"]) for pair in pairs]
    changed = [place for place in places if place is not None]
    row: dict[str, Any] = {}
    for rule in RULES:
        sides = [pair[rule] for pair in pairs]
        row[rule] = {
            "acceptance_length": round(1 + total(sides, "accepted") / total(sides, "steps"), 3),
            "tokens_per_second": round(statistics.median(side["speed"] for side in sides), 2),
            "accepted": total(sides, "accepted"),
            "drafted": total(sides, "drafted"),
        }
    return row | {
        "loosely_accepted": total([pair["fly"] for pair in pairs], "loose"),
        "fly_tokens": sum(len(pair["fly"]["token_ids"]) for pair in pairs),
        "ratio": [round(ratios[0], 2), round(statistics.median(ratios), 2), round(ratios[-1], 2)],
        "changed_texts": len(changed),
        "texts": len(pairs),
        "first_change_at": sorted(changed),
    }


def answer(
    llm: LLM, prompts: list[str], rule: str, *, temperature: float, seeds: Sequence[int], max_tokens: int
) -> list[dict[str, Any]]:
    """A text for each prompt under one rule, with what it cost."""
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=True,
            speculative_config={"rejection_sample_method": rule},
        )
        for seed in seeds
    ]
    sides = []
    for output in llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params):
        assert output.metrics is not None
        spec = output.metrics.speculative_decoding
        assert spec is not None
        token_ids = output.outputs[0].token_ids
        sides.append(
            {
                "token_ids": token_ids,
                "speed": (len(token_ids) - 1) / output.metrics.generation_time_s,
                "steps": spec["num_spec_steps"],
                "drafted": spec["num_draft_tokens"],
                "accepted": spec["num_accepted_draft_tokens"],
                "loose": spec["num_loosely_accepted_tokens"],
            }
        )
    return sides


def total(sides: list[dict[str, Any]], name: str) -> int:
    return sum(side[name] for side in sides)


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8, help="K")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch", action="store_true", help="all prompts at once: no speeds")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no prompt is begun after this")
    return parser.parse_args()


if __name__ == "__main__":
    main()
