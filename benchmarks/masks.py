"""What structured output costs beside the model: reading the vocabulary, compiling a schema, the mask of a row.

    python benchmarks/masks.py MODEL [MODEL ...] [--rounds 5]

The schema is that of `structured.py`. A compact answer is followed token by token; masks are timed the first time
round, when states of the automaton are new, and again. Milliseconds: median (lowest to highest); a JSON line a model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from structured import SCHEMA

from forerun.models.builtin import resolve_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.structured.compiler import Compiler
from forerun.structured.guide import WORD, Guide
from forerun.structured.processor import StructuredProcessor
from forerun.structured.request import StructuredOutputs

ANSWER = (
    '{"customer_name":"Ada Lovelace","order_number":"AB-1234","delivery_address":{"street":"12 Long Street",'
    '"city":"London"},"priority":"express"'
)


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def summary(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"


def masks(compiler: Compiler, asked: StructuredOutputs, ids: Sequence[int]) -> list[float]:
    """The time of the mask at each place of the answer."""
    eos_ids = compiler.vocabulary.eos_ids
    guide = Guide(compiler.matcher(asked), lambda: compiler.fresh(asked), None, eos_ids)
    mask = np.zeros(-(-len(compiler.vocabulary.tokens) // WORD), np.int32)
    times = []
    for token_id in ids:
        times.append(milliseconds(lambda: guide.fill(mask)))
        guide.commit([token_id])
        assert not guide.error, guide.error
    return times


def measure(name: str, tokenizer: Tokenizer, rounds: int) -> dict[str, str | int]:
    asked = StructuredOutputs.parse({"json": SCHEMA, "disable_any_whitespace": True})
    ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    reading, compiling, new, known = [], [], [], []
    for _ in range(rounds):
        processor = StructuredProcessor(tokenizer, tokenizer.eos_token_ids)
        reading.append(milliseconds(lambda p=processor: p._compiler))
        compiler = processor._compiler
        compiling.append(milliseconds(lambda c=compiler: c.fresh(asked)))
        new += masks(compiler, asked, ids)
        known += masks(compiler, asked, ids)
    figures = {"reading": reading, "compiling": compiling, "mask, first time": new, "mask, again": known}
    return {"model": name, "vocabulary": tokenizer.vocab_size} | {what: summary(t) for what, t in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name in options.models:
        tokenizer = load_tokenizer(str(resolve_model(name)), None)
        print(json.dumps(measure(name, tokenizer, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
