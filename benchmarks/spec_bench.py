"""Are the texts with drafts those without? On real prompts, greedy and seeded, for each method.

    python benchmarks/spec_bench.py --dataset question.jsonl [--model smollm2-135m] [--num-prompts 40] [--max-tokens 64]

Reads Spec-Bench's questions (a JSON object a line with `category` and `turns`; the first turn is used), takes the same
number from each category, and serves all of them in one batch: plain, then with each method. Prints acceptance by
category, and exits with 1 if a single token differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.datasets import in_turns, spec_bench_questions
from forerun.llm import RequestOutput

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}


def acceptance(outputs: list[RequestOutput]) -> tuple[int, int, int]:
    """Verification steps with a draft, drafted tokens, accepted ones."""
    figures = [o.metrics.speculative_decoding or {} for o in outputs if o.metrics]
    keys = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    steps, drafted, accepted = (sum(f.get(key, 0) for f in figures) for key in keys)
    return steps, drafted, accepted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    questions = in_turns(spec_bench_questions(options.dataset), options.num_prompts)
    conversations = [[{"role": "user", "content": question.text}] for question in questions]
    params = {
        "greedy": [SamplingParams(temperature=0, max_tokens=options.max_tokens)] * len(questions),
        "seeded": [
            SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=options.max_tokens)
            for seed in range(len(questions))
        ],
    }
    reference: dict[str, list[list[int]]] = {}
    report: list[dict[str, Any]] = []
    for method, config in METHODS.items():
        llm = LLM(options.model, speculative_config=config, enable_prefix_caching=False)
        for kind, each in params.items():
            started = time.perf_counter()
            outputs = llm.chat(conversations, each)
            seconds = time.perf_counter() - started
            texts = [o.outputs[0].token_ids for o in outputs]
            expected = reference.setdefault(kind, texts)
            same = sum(a == b for a, b in zip(texts, expected, strict=True))
            num_tokens = sum(map(len, texts))
            print(f"{method:7} {kind:7} {same}/{len(texts)} texts identical, {num_tokens} tokens in {seconds:.1f} s")
            row = {"method": method, "kind": kind, "identical": same, "texts": len(texts), "tokens": num_tokens}
            report.append(row | {"seconds": round(seconds, 2)})
            if config is None:
                continue
            for category in dict.fromkeys(question.task for question in questions):
                own = [o for o, q in zip(outputs, questions, strict=True) if q.task == category]
                steps, drafted, accepted = acceptance(own)
                print(f"    {category:20} {steps:5} steps with a draft, {accepted:5} of {drafted:5} tokens accepted")
        del llm
    print(json.dumps(report))
    return 0 if all(row["identical"] == row["texts"] for row in report) else 1


if __name__ == "__main__":
    sys.exit(main())
