"""What it costs on a CPU to draw the token of one row: from logits to the processed distribution to the draw.

    python benchmarks/draws.py [--rows 60] [--threads 2]

Logits are random, spread as a language model's are (a few likely tokens, a long tail). Milliseconds a row: the median,
with the lowest and the highest tenth. The last line is JSON; `tokens` are the sums of the tokens drawn, which show that
two versions of the code draw the same.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from forerun.request import SamplingParams
from forerun.sampling.distribution import draw, processed_logprobs

KINDS = {
    "temperature 1": SamplingParams(),
    "temperature 0.8, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k 40": SamplingParams(top_k=40),
}
VOCABULARIES = (49_152, 151_936)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = []
    for vocab in VOCABULARIES:
        logits = torch.randn(options.rows, vocab, generator=torch.Generator().manual_seed(1)) * 2.5
        logits[:, ::5000] += torch.linspace(6.0, 14.0, logits[:, ::5000].shape[1])
        for kind, params in KINDS.items():
            times, tokens = [], 0
            for seed, row in enumerate(logits):
                started = time.perf_counter()
                tokens += draw(processed_logprobs(row, params), seed, 0, 7)
                times.append(1e3 * (time.perf_counter() - started))
            times.sort()
            low, middle, high = (times[int(share * (len(times) - 1))] for share in (0.1, 0.5, 0.9))
            print(f"V {vocab:6}  {kind:28} {middle:6.2f} ms ({low:.2f}-{high:.2f})")
            report.append({"vocab": vocab, "kind": kind, "ms": round(middle, 3), "tokens": tokens})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
