"""forerun's side: the public engine, whatever kernels it runs on."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.bench.process import MIB, Server
from forerun.engine.plan import Plan, ScheduledRequest
from forerun.request import Request, RequestCache
from forerun.spec.proposer import RequestDraft
from peers.common import Answer

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}
CONTEXT = 16  # tokens before a verification step
WARM_UPS = 2


def load(
    model: Path, threads: int, context: int, cache_mib: int, method: str | None = None, kv_dtype: str = "auto"
) -> LLM:
    return LLM(
        str(model),
        speculative_config=METHODS[method] if method else None,
        num_threads=threads,
        max_model_len=context,
        kv_cache_memory_bytes=cache_mib * MIB,
        kv_cache_dtype=kv_dtype,
        enable_prefix_caching=False,
    )


class Target:
    """The target alone: passes over plans made by hand, through the runner that serves. The engine must be idle."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine

    def steps(self, rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        """Tokens/s of a step of so many rows of one sequence, logits of the last row only."""
        return {count: self._time(self._tokens(count), [], 0, repeats) for count in rows}

    def verify_steps(self, rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        """Tokens/s of a step of one known token and a draft, logits of all rows."""
        known = self._tokens(CONTEXT + 1)
        return {count: self._time(known, self._tokens(count - 1), CONTEXT, repeats) for count in rows}

    def logits(self, known: Sequence[int], draft: Sequence[int]) -> Tensor:
        """[1 + draft, V] float32: of the last known token and of each drafted one, as a verification gets them."""
        request = self._request(known, len(draft))
        try:
            self._fill(request, len(known) - 1)
            plan = Plan([ScheduledRequest(request, len(known) - 1, 1, RequestDraft(list(draft)), samples=True)])
            return self._engine.runner.forward(plan).logits
        finally:
            self._engine.scheduler.target.free(request.caches[0].blocks)

    def _time(self, known: Sequence[int], draft: Sequence[int], start: int, repeats: int) -> list[float]:
        request = self._request(known, len(draft))
        scheduled = ScheduledRequest(request, start, len(known) - start, RequestDraft(list(draft)), samples=True)
        rates = []
        try:
            self._fill(request, start)
            for _ in range(WARM_UPS + repeats):
                started = time.perf_counter()
                self._engine.runner.forward(Plan([scheduled]))
                rates.append(scheduled.num_rows / (time.perf_counter() - started))
        finally:
            self._engine.scheduler.target.free(request.caches[0].blocks)
        return rates[WARM_UPS:]

    def _fill(self, request: Request, end: int) -> None:
        """Compute the first `end` tokens, in chunks as the scheduler would make them."""
        chunk = self._engine.scheduler.max_num_batched_tokens
        for start in range(0, end, chunk):
            self._engine.runner.forward(Plan([ScheduledRequest(request, start, min(chunk, end - start))]))

    def _request(self, tokens: Sequence[int], num_drafted: int) -> Request:
        num_blocks = -(-(len(tokens) + num_drafted) // self._engine.scheduler.block_size)
        blocks = self._engine.scheduler.target.allocate(num_blocks)
        assert blocks is not None, "the KV cache is too small: raise --kv-cache-mib"
        return Request(
            "probe", list(tokens), len(tokens), SamplingParams(temperature=0), 0, caches=[RequestCache(blocks)]
        )

    def _tokens(self, count: int) -> list[int]:
        return random.Random(count).choices(range(self._engine.info().vocab_size), k=count)


def answer(llm: LLM, prompt_ids: Sequence[int], max_tokens: int, *, speculation: bool) -> Answer:
    """A greedy answer, alone on the engine."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (output,) = llm.generate(list(prompt_ids), params, speculation=speculation)
    found = output.outputs[0]
    assert found.metrics is not None
    spec = found.metrics.speculative_decoding or {}
    drafted, accepted = spec.get("num_draft_tokens", 0), spec.get("num_accepted_draft_tokens", 0)
    seconds = found.metrics.generation_time_s
    return Answer(len(found.token_ids), seconds, drafted, accepted, tuple(found.token_ids))


def serve(model: Path, threads: int, context: int, cache_mib: int) -> Server:
    flags = ["--num-threads", str(threads), "--max-model-len", str(context), "--kv-cache-memory", f"{cache_mib}MiB"]
    return Server([sys.executable, "-m", "forerun", "serve", str(model), *flags])
