"""What a draft model brings on real prompts: time per token and acceptance against plain, alone and after suffix.

    python benchmarks/draft_models.py --target target.gguf --draft draft.gguf --dataset question.jsonl \\
        [--lengths 2 4 8] [--questions 5] [--max-tokens 96] [--rounds 2] [--check-transformers]

Takes the first questions of each category of Spec-Bench (coding and math_reasoning). One engine has both proposers
loaded; each question is answered greedily, one at a time, plain, by the draft model, and by suffix then draft model,
for each K; sides alternate, and who is first changes from question to question. Texts are compared with the plain one.

`--check-transformers` then feeds every text to both models, ours and transformers' (in float32), and compares, position
by position, whether the draft's most likely token is the target's: the acceptance of greedy drafts, teacher-forced.

Figures are medians over rounds with the lowest and the highest. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peers.common import load_average, spread
from proposers import commit, processor
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.attention import Segment
from forerun.bench.datasets import read_questions
from forerun.models.decoder import attention_spec
from forerun.models.loading import load_model
from forerun.models.paged import PagedModel
from forerun.request import SpecStats

MIB = 2**20
BLOCK_SIZE = 16
Side = tuple[str, dict[str, Any]]  # its name, and the request's own speculative_config


def main() -> int:
    options = parse()
    questions = read_questions(options.dataset, options.categories, options.questions)
    llm = LLM(
        str(options.target),
        speculative_config={
            "method": [
                {"method": "suffix", "num_speculative_tokens": max(options.lengths)},
                {"method": "draft_model", "model": str(options.draft), "num_speculative_tokens": max(options.lengths)},
            ]
        },
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_mib * MIB,
        num_threads=options.threads,
        enable_prefix_caching=False,
    )
    prompts = [llm.tokenizer.apply_chat_template([{"role": "user", "content": q.text}]) for q in questions]
    sides = all_sides(options.lengths)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name, _ in sides}
    texts: list[list[int]] = []
    different = 0
    for number in range(options.rounds):
        for name in found:
            found[name].append([])
        for place, prompt in enumerate(prompts):
            first = (number + place) % len(sides)
            for name, choice in sides[first:] + sides[:first]:
                found[name][-1].append(answer(llm, prompt, choice, options.max_tokens))
            plain = found["plain"][-1][-1]["token_ids"]
            different += sum(found[name][-1][-1]["token_ids"] != plain for name in found)
            if number == 0:
                texts.append(plain)
            print(f"round {number + 1}: {place + 1} of {len(prompts)} questions", file=sys.stderr, flush=True)
    report = {name: summary(rounds) for name, rounds in found.items()}
    show(report, different)
    checked = check(options, prompts, texts, llm) if options.check_transformers else None
    about = {"benchmark": "draft_models", "commit": commit(), "machine": processor(), "threads": options.threads}
    about |= {"target": options.target.name, "draft": options.draft.name, "questions": len(prompts)}
    about |= {"max_tokens": options.max_tokens, "rounds": options.rounds, "load_average": load_average()}
    print(json.dumps(about | {"different_texts": different, "results": report, "teacher_forced": checked}))
    return 1 if different or (checked and checked["positions_that_differ"]) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--draft", type=Path, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="Spec-Bench's question.jsonl")
    parser.add_argument("--categories", nargs="+", default=["coding", "math_reasoning"])
    parser.add_argument("--questions", type=int, default=5, help="of each category")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8], metavar="K")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--check-transformers", action="store_true")
    return parser.parse_args()


def all_sides(lengths: Sequence[int]) -> list[Side]:
    sides: list[Side] = [("plain", {"method": "none"})]
    for methods in (["draft_model"], ["suffix", "draft_model"]):
        for length in lengths:
            choice = {"method": methods, "num_speculative_tokens": length}
            sides.append((f"{' + '.join(methods)} K={length}", choice))
    return sides


def answer(llm: LLM, prompt: list[int], choice: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, speculative_config=choice)
    (output,) = llm.generate(prompt, params)
    metrics = output.outputs[0].metrics
    assert metrics is not None
    spec = metrics.speculative_decoding or SpecStats().as_dict()
    return {
        "token_ids": output.outputs[0].token_ids,
        "seconds": metrics.generation_time_s,
        "steps": spec["num_spec_steps"],
        "drafted": spec["num_draft_tokens"],
        "accepted": spec["num_accepted_draft_tokens"],
    }


def summary(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Over all questions; time from the first token to the last."""
    totals: dict[str, int] = defaultdict(int)
    for each in rounds[0]:
        for key in ("steps", "drafted", "accepted"):
            totals[key] += each[key]
    ms = [
        1000 * sum(a["seconds"] for a in answers) / sum(len(a["token_ids"]) - 1 for a in answers) for answers in rounds
    ]
    length = 1 + totals["accepted"] / totals["steps"] if totals["steps"] else 1.0
    rate = totals["accepted"] / totals["drafted"] if totals["drafted"] else None
    return {"ms_per_token": spread(ms), "acceptance_length": length, "acceptance_rate": rate, **totals}


def show(report: dict[str, dict[str, Any]], different: int) -> None:
    table = Table(title="greedy, one request at a time", title_justify="left", box=SIMPLE, pad_edge=False)
    for column in ("", "ms per token", "speed-up", "acceptance length", "accepted / drafted"):
        table.add_column(column, justify="left" if not column else "right")
    plain = report["plain"]["ms_per_token"]["median"]
    for name, found in report.items():
        ms = found["ms_per_token"]
        cells = [f"{ms['median']:.1f} ({ms['low']:.1f}-{ms['high']:.1f})", f"{plain / ms['median']:.2f}x"]
        drafted = f"{found['accepted']} / {found['drafted']}" if found["drafted"] else ""
        table.add_row(name, *cells, f"{found['acceptance_length']:.2f}" if drafted else "", drafted)
    Console().print(table)
    print(f"texts that differ from the plain one: {different}")


def check(
    options: argparse.Namespace, prompts: Sequence[list[int]], texts: Sequence[list[int]], llm: LLM
) -> dict[str, Any]:
    """Teacher-forced: where the draft's choice is the target's, by our models and by transformers'."""
    matches: dict[str, list[bool]] = {}
    for library, load in (("forerun", our_logits), ("transformers", their_logits)):
        choices: dict[str, list[int]] = {"target": [], "draft": []}
        for role, chosen in choices.items():
            logits = load(getattr(options, role), options.max_model_len)
            for prompt, text in zip(prompts, texts, strict=True):
                rows = logits(prompt + text, len(text) + 1)[:, : llm.tokenizer.vocab_size]
                chosen += rows.argmax(-1).tolist()
            print(f"teacher-forced: {library}, {role}", file=sys.stderr, flush=True)
        matches[library] = [a == b for a, b in zip(choices["target"], choices["draft"], strict=True)]
    ours, theirs = matches["forerun"], matches["transformers"]
    differ = sum(a != b for a, b in zip(ours, theirs, strict=True))
    print(
        f"teacher-forced: {sum(ours)} of {len(ours)} drafted tokens stand by our models, {sum(theirs)} by "
        f"transformers'; {differ} positions differ"
    )
    found = {"positions": len(ours), "accepted": sum(ours), "accepted_transformers": sum(theirs)}
    return found | {"positions_that_differ": differ}


Logits = Callable[[list[int], int], Tensor]
"""(token ids, n) -> [n, V], of the last n."""


def our_logits(path: Path, max_model_len: int) -> Logits:
    """By the decoder and the attention that serve, in float32."""
    model = load_model(path, torch.float32, max_model_len)
    num_blocks = -(-max_model_len // BLOCK_SIZE)
    shape = attention_spec(model.config, BLOCK_SIZE).shape
    memory = torch.zeros(num_blocks * shape.block_bytes(4), dtype=torch.uint8)
    paged = PagedModel.over(model, memory, torch.float32, BLOCK_SIZE)

    def logits(token_ids: list[int], count: int) -> Tensor:
        output = paged.forward([Segment(token_ids, 0, range(num_blocks))])
        return paged.logits(output, range(len(token_ids) - count, len(token_ids)))

    return logits


def their_logits(path: Path, max_model_len: int) -> Logits:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)

    @torch.inference_mode()
    def logits(token_ids: list[int], count: int) -> Tensor:
        rows: Tensor = model(torch.tensor([token_ids]), logits_to_keep=count).logits[0]
        return rows

    return logits


if __name__ == "__main__":
    sys.exit(main())
