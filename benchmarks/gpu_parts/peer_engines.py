"""The peers, each in a process of its own after ours has given its memory back: sides cannot take turns in one process.

vLLM gives new tokens from `LLMEngine.step` as our engine does, so both run in the same loop with the same prompts.
transformers' compiled generate is timed by a streamer, which is given each token.
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .children import results, tell
from .models import ROWS_A_STEP, Models
from .options import SETTLE, Options
from .report import Column, Report, number, with_spread
from .steps import Batch, Moment, Timing

PEERS = {"transformers": "transformers", "vllm-plain": "vllm", "vllm-eagle3": "vllm"}  # child -> its package
TIMEOUT_S = 560
GENERATED = 128


def peers(report: Report, options: Options, folder: Path, names: Sequence[str]) -> None:
    """names: of `PEERS`, those to measure."""
    columns = [
        Column("peer", "peer", least_width=12),
        Column("version", "version"),
        Column("batch", "batch"),
        Column("ms", "ms a token", with_spread),
        Column("tokens_per_s", "tokens/s", number(0)),
        Column("tokens_a_step", "tokens a step", number(2)),
        Column("ours_ms", "ours, this run", number(2)),
        Column("ratio", "peer / ours", number(2)),
    ]
    table = report.table("peers", "Peers, in processes of their own after ours: ms a token and request", columns)
    for kind in names:
        if importlib.util.find_spec(PEERS[kind]) is None:
            table.note(f"{kind}: not measured, {PEERS[kind]} is not installed")
            continue
        part = "eagle3" if kind.endswith("eagle3") else "plain"
        ours = {row["batch"]: row["ms"]["median"] for row in report.tables[part].rows} if part in report.tables else {}
        try:
            for result in results(kind, options, folder, TIMEOUT_S):
                if "batch" not in result.values:
                    table.note(f"{kind}: ready after {result.after_s:.0f} s")
                    continue
                mine = ours.get(result.values["batch"])
                ratio = None if mine is None else result.values["ms"]["median"] / mine
                table.add(peer=kind, ours_ms=mine, ratio=ratio, **result.values)
        except RuntimeError as error:
            report.fail(f"peers: {error}")


def time_transformers(options: Options, folder: Path) -> None:
    """The child for transformers: batch 1, static cache, compiled."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tell({"ready": True})
    draw = random.Random(1)
    prompt = torch.tensor(
        [[draw.randrange(3, config.vocab_size) for _ in range(options.prompt)]], device=options.device
    )
    rounds = []
    for _ in range(2 + options.rounds):  # the first compile
        clock = Clock()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=GENERATED,
            max_new_tokens=GENERATED,
            cache_implementation="static",
            streamer=clock,
        )
        rounds.append(clock.moments[1 + SETTLE :])
    timing = Timing.of(rounds[2:], 1, options.prompt)
    tell({"batch": 1, "version": transformers.__version__, **asdict(timing)})


class Clock:
    """A streamer for transformers: when each token came; first the prompt."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def put(self, value: Any) -> None:
        self.moments.append(Moment(time.perf_counter(), len(self.moments)))

    def end(self) -> None:
        pass


class Vllm:
    """vLLM's engine in this process, as a `Server`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> Mapping[str, int]:
        new = {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}
        return {request_id: count for request_id, count in new.items() if count}

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


def time_vllm(kind: str, options: Options, folder: Path) -> None:
    """The child for vLLM. kind: "plain" or "eagle3"."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    models = Models(options, folder)
    llm = vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=models.max_model_len,
        max_num_seqs=max(options.batch),
        max_num_batched_tokens=ROWS_A_STEP,
        enable_prefix_caching=False,
        speculative_config=models.speculative_config(kind),
    )
    tell({"ready": True})
    server = Vllm(llm.llm_engine)
    for size in options.batch:
        rounds = []
        for _ in range(options.rounds):
            with Batch(server, size, options.prompt, models.vocab_size, models.max_model_len - options.prompt) as batch:
                rounds.append(batch.watch(options.steps))
        tell({"batch": size, "version": vllm.__version__, **asdict(Timing.of(rounds, size, options.prompt))})
