"""How far the logits that we serve are from the dequantised file's in float32; and llama.cpp's, on the same file.

    python benchmarks/quality.py --model model-q4_0.gguf --dataset question.jsonl [--llama-cpp BUILD/bin] [--prompts 50]

The reference is the plain torch model: every weight of the file as a float32, one pass, no packed kernels, no paged
cache. It continues each question greedily; this text is then fed to every side (teacher forcing), and the logits of
its rows are compared: Kullback-Leibler divergence KL(reference || side) in nats a token, computed in float64 over the
whole vocabulary, and how often the most likely token is the same.

Ours come from the engine as it serves: the question in chunks, the text as a draft that is verified, which gives the
bits of plain decoding. llama.cpp's come from its program llama-results, which writes the float32 logits of every row
to a file: exact, where llama-perplexity's file of base logits holds 16 bits a logit, and the server's logprobs only
the most likely tokens. It takes text, not ids: questions are plain text here, without a chat template, and the ids
compared are those that it makes of question and text. Were the reference wrong, llama.cpp's divergence would show it.

Without the program llama-results its side is skipped and named. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import ours
from peers.common import load_average
from peers.llama_cpp import LlamaCpp
from proposers import commit, processor
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from forerun.bench.datasets import read_questions
from forerun.models.decoder import Decoder
from forerun.models.loading import load_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer

ALL_CATEGORIES = ("coding", "summarization", "rag", "qa", "math_reasoning", "translation", "writing", "reasoning")
SPARE_TOKENS = 64  # another tokenizer may make more tokens of a text than ours
Divergences = tuple[Tensor, Tensor]  # [rows] nats; [rows] whether the most likely token is the same


class Reference:
    """The plain model with keys and values in two tensors a layer: one sequence, no blocks, nothing fused."""

    def __init__(self, model: Path) -> None:
        self._decoder: Decoder = load_model(model, dtype=torch.float32)
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}

    def greedy(self, ids: Sequence[int], count: int, end_ids: set[int]) -> list[int]:
        """At most `count` tokens; the end token is not among them."""
        self._cache.clear()
        tokens: list[int] = []
        logits = self._forward(ids, 0, 1)
        while len(tokens) < count:
            token = int(logits[-1].argmax())
            if token in end_ids:
                break
            tokens.append(token)
            logits = self._forward([token], len(ids) + len(tokens) - 1, 1)
        return tokens

    def logits(self, ids: Sequence[int], num_rows: int) -> Tensor:
        """[num_rows, V], of the last rows."""
        self._cache.clear()
        return self._forward(ids, 0, num_rows)

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], start: int, num_rows: int) -> Tensor:
        positions = torch.arange(start, start + len(ids))
        hidden = self._decoder.forward(torch.tensor(ids), positions, self._attend).hidden
        return self._decoder.logits(hidden[-num_rows:])

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self._cache:
            key, value = (torch.cat(pair) for pair in zip(self._cache[layer], (key, value), strict=True))
        self._cache[layer] = key.clone(), value.clone()
        num_rows, num_keys = query.shape[0], key.shape[0]
        seen = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [heads, T, D]
        return F.scaled_dot_product_attention(q[None], k[None], v[None], seen, enable_gqa=True)[0].transpose(0, 1)


def divergences(reference: Tensor, logits: Tensor) -> Divergences:
    """Of each row: KL(reference || logits) in nats, and whether both have the same most likely token. [R, V] each."""
    wanted, found = (torch.log_softmax(x.double(), -1) for x in (reference, logits))
    same = reference.argmax(-1) == logits.argmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1), same


def summary(found: Sequence[Divergences]) -> dict[str, float]:
    """Over all rows of all prompts; `prompt_high` is the worst prompt's mean."""
    kl, same = (torch.cat(parts) for parts in zip(*found, strict=True))
    means = torch.stack([each.mean() for each, _ in found])
    figures = {
        "mean_kl": kl.mean(),
        "standard_error": means.std() / len(means) ** 0.5 if len(means) > 1 else torch.tensor(0.0),
        "median_kl": kl.median(),
        "p99_kl": kl.quantile(0.99),
        "max_kl": kl.max(),
        "prompt_high": means.max(),
        "same_top_token": same.double().mean(),
    }
    return {name: float(f"{float(value):.4g}") for name, value in figures.items()}


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def choose_prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """So many questions that are short enough, in turns from each category."""
    by_category: dict[str, list[list[int]]] = {category: [] for category in options.categories}
    for question in read_questions(options.dataset, options.categories, sys.maxsize):
        ids = tokenizer.encode(question.text)
        if len(ids) <= options.max_prompt_tokens:
            by_category[question.category].append(ids)
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(*by_category.values()))
    return [ids for ids in in_turns if ids is not None][: options.prompts]


def main() -> None:
    options = parse()
    peer = LlamaCpp(options.llama_cpp, options.threads)
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(str(options.model))
    prompts = choose_prompts(options, tokenizer)
    sides = {f"forerun, {dtype} cache": dtype for dtype in options.kv_cache_dtypes}
    found: dict[str, list[Divergences]] = {side: [] for side in sides}
    if peer.has("llama-results"):
        found["llama.cpp"] = []
    else:
        say("skipped: llama.cpp's llama-results is not there")

    reference = Reference(options.model)
    texts: list[tuple[list[int], Tensor]] = []  # ids of question and text; the reference's logits of the text's rows
    for place, prompt in enumerate(prompts):
        ids = prompt + reference.greedy(prompt, options.max_tokens, set(tokenizer.eos_token_ids))
        theirs = None
        if "llama.cpp" in found:
            ids, logits = peer.logits(options.model, tokenizer.decode(ids), len(ids) + SPARE_TOKENS)
            theirs = torch.from_numpy(logits)
        num_rows = len(ids) + 1 - common_length(ids, prompt)
        texts.append((ids, reference.logits(ids, num_rows)))
        if theirs is not None:
            found["llama.cpp"].append(divergences(texts[-1][1], theirs[-num_rows:]))
        say(f"reference: {place + 1} of {len(prompts)} prompts")
    del reference  # two models at once may be too many

    for side, dtype in sides.items():
        found[side] = our_divergences(options, texts, dtype)
        say(f"{side}: {len(texts)} prompts")
    report(options, peer, found)


def our_divergences(
    options: argparse.Namespace, texts: Sequence[tuple[list[int], Tensor]], kv_dtype: str
) -> list[Divergences]:
    context = options.max_prompt_tokens + options.max_tokens + SPARE_TOKENS
    llm = ours.load(options.model, options.threads, context, options.kv_cache_mib, kv_dtype=kv_dtype)
    target = ours.Target(llm)
    found = []
    for ids, wanted in texts:
        first = len(ids) + 1 - len(wanted)
        found.append(divergences(wanted, target.logits(ids[:first], ids[first:])))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="Spec-Bench's question.jsonl")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--categories", nargs="+", default=ALL_CATEGORIES)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer questions are left out")
    parser.add_argument("--max-tokens", type=int, default=48, help="of the reference's text")
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    parser.add_argument(
        "--kv-cache-dtypes", nargs="+", default=["float32", "bfloat16"], help="forerun's, one after another"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(options: argparse.Namespace, peer: LlamaCpp, found: dict[str, list[Divergences]]) -> None:
    figures: dict[str, Any] = {side: summary(each) for side, each in found.items()}
    own = next(iter(found.values()))
    num_rows = sum(len(kl) for kl, _ in own)
    title = f"{options.model.name}: KL from the file in float32, nats a token; {num_rows} tokens"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("")
    for side in figures:
        table.add_column(side, justify="right")
    for name in next(iter(figures.values())):
        table.add_row(name.replace("_", " "), *(f"{values[name]:.4g}" for values in figures.values()))
    Console().print(table)
    about = {"benchmark": "quality", "commit": commit(), "machine": processor(), "llama_cpp": peer.version}
    about |= {"model": options.model.name, "prompts": len(own), "tokens": num_rows}
    if "llama.cpp" in figures:
        theirs = max(1e-12, figures["llama.cpp"]["mean_kl"])
        about["ratio_of_means"] = {side: float(f"{f['mean_kl'] / theirs:.4g}") for side, f in figures.items()}
    print(json.dumps(about | {"load_average": load_average(), "results": figures}))


if __name__ == "__main__":
    main()
