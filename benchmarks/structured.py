"""What a JSON schema costs, and what drafting brings under one: extraction from short texts, greedy.

    python benchmarks/structured.py [--model smollm2-135m] [--rounds 3] [--max-tokens 100] [--whitespace]

Serves the same texts one at a time with each method, in turns, and prints medians of tokens per second after the first
token, with the steps that were needed. `free` is without a schema; its texts differ. Texts under the schema are
compared token by token over all methods. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from forerun import LLM, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    "grammar": {"method": "grammar"},
    "grammar+ngram": {"method": ["grammar", NGRAM]},
    "ngram+grammar": {"method": [NGRAM, "grammar"]},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 40},
        "order_number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "delivery_address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 40}, "city": {"type": "string", "maxLength": 30}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "priority": {"enum": ["standard", "express", "overnight"]},
        "number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
        "gift_wrapping_requested": {"type": "boolean"},
    },
    "required": [
        "customer_name", "order_number", "delivery_address", "priority", "number_of_items", "gift_wrapping_requested",
    ],
    "additionalProperties": False,
}  # fmt: skip
TEXTS = (
    "Maria Lopez wrote about order KX-4821: three lamps, to 14 Harbour Street in Bristol, overnight, gift wrapped.",
    "Order PT-0097 of Jonas Weber goes to Lindenallee 5, Leipzig. Twelve items, no hurry, no wrapping.",
)


def work(constrained: bool, whitespace: bool, max_tokens: int) -> SamplingParams:
    form = {"json": SCHEMA, "disable_any_whitespace": not whitespace} if constrained else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=form, ignore_eos=not constrained)


def one_round(llm: LLM, params: SamplingParams) -> tuple[float, float, int, list[list[int]]]:
    """Tokens per second after the first, seconds a step after the first, steps, and the tokens of each text."""
    seconds, num_tokens, steps, texts = 0.0, 0, 0, []
    for text in TEXTS:
        prompt = f"Extract the order as JSON with the keys {', '.join(SCHEMA['properties'])}.\n\n{text}"
        before = llm.stats.num_steps
        (answer,) = llm.chat([{"role": "user", "content": prompt}], params)
        assert answer.metrics is not None
        seconds += answer.metrics.generation_time_s
        steps += llm.stats.num_steps - before - 1
        num_tokens += len(answer.outputs[0].token_ids) - 1
        texts.append(answer.outputs[0].token_ids)
    return num_tokens / seconds, seconds / steps, steps, texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--whitespace", action="store_true", help="let the JSON have whitespace between its parts")
    options = parser.parse_args()
    llms = {name: LLM(options.model, speculative_config=spec, max_model_len=1024) for name, spec in METHODS.items()}
    runs = {"free": (llms["plain"], False)} | {name: (llm, True) for name, llm in llms.items()}
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in runs}
    texts: dict[str, list[list[int]]] = {}
    started = time.monotonic()
    for round_ in range(options.rounds + 1):  # the first one warms up
        for name, (llm, constrained) in runs.items():
            num_tokens = options.max_tokens if round_ else 4
            speed, step, steps, text = one_round(llm, work(constrained, options.whitespace, num_tokens))
            texts[name] = text
            print(f"round {round_} {name}: {speed:.1f} tokens/s, {time.monotonic() - started:.1f} s", file=sys.stderr)
            if round_:
                found[name].append((speed, step, steps))
    print(
        f"{options.model}, {len(TEXTS)} texts, medians of {options.rounds} rounds, {time.monotonic() - started:.0f} s"
    )
    report: dict[str, Any] = {"model": options.model, "whitespace": options.whitespace}
    for name, figures in found.items():
        speeds = [speed for speed, _, _ in figures]
        median, step = statistics.median(speeds), statistics.median(s for _, s, _ in figures)
        report[name] = {"tokens_per_s": median, "step_ms": step * 1e3, "steps": figures[0][2]}
        num_tokens, spread = sum(map(len, texts[name])), f"{min(speeds):.1f} to {max(speeds):.1f}"
        steps = f"{step * 1e3:6.2f} ms a step, {figures[0][2]:4d} steps for {num_tokens} tokens"
        print(f"{name:14s} {median:7.1f} tokens/s ({spread}), {steps}")
    same = all(texts[name] == texts["plain"] for name in METHODS)
    print(f"tokens under the schema are the same with all methods: {same}")
    print(llms["plain"].tokenizer.decode(texts["plain"][0]))
    print(json.dumps(report | {"same": same}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
