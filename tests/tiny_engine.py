"""Engines on the tiny target, for tests that run the real loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.engine.build import build_engine
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest, RequestOutput
from forerun.request import Request, SamplingParams
from forerun.spec.config import SpeculativeConfig
from forerun.spec.control import FixedLength
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer
from tests.models.tiny import hf_model, save_hf
from tests.tiny_tokenizer import IM_END, IM_START, VOCAB_SIZE, save_tiny_tokenizer

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
HEAD_SCALE = 3.0


def save_tiny_target(folder: Path, seed: int = 0, family: str = "llama", **sizes: Any) -> Path:
    model = hf_model(
        family,
        seed,
        **{
            "vocab_size": VOCAB_SIZE,
            "num_hidden_layers": 2,
            "max_position_embeddings": 256,
            "bos_token_id": IM_START,
            "eos_token_id": IM_END,
            **sizes,
        },
    )
    model.lm_head.weight.data.mul_(HEAD_SCALE)
    save_hf(model, folder)
    return save_tiny_tokenizer(folder)


def make_engine(
    model: Path, spec: Mapping[str, Any] | ScriptedProposer | None = None, *, length: int = 4, **settings: Any
) -> Engine:
    """An engine for T. A `ScriptedProposer` is put in the proposer's place, drafting up to `length` tokens."""
    config = None if spec is None or isinstance(spec, ScriptedProposer) else SpeculativeConfig.parse(spec)
    defaults: dict[str, Any] = {
        "device": "cpu",
        "kv_cache_memory_bytes": 8 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
    }
    engine = build_engine(EngineConfig(model=str(model), speculative_config=config, **(defaults | settings)))
    if isinstance(spec, ScriptedProposer):
        engine.proposer = spec
        engine.scheduler.on_release = spec.forget
        engine.control = FixedLength(length)
    return engine


class Result:
    """All outputs of one request, joined."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.drafted: list[bool] = []
        self.outputs: list[RequestOutput] = []

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        self.drafted += output.drafted
        self.outputs.append(output)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def logprobs(self) -> list[Any]:
        return [entry for output in self.outputs for entry in output.logprobs or []]

    @property
    def key(self) -> tuple[Any, ...]:
        """What must not depend on speculation."""
        return self.token_ids, self.text, self.last.finish_reason, self.last.stop_reason


Work = Sequence[tuple[Sequence[int], SamplingParams]]


def run(engine: Engine, work: Work, *, together: bool = True, check: bool = True, **fields: Any) -> list[Result]:
    """Serve (prompt, params) pairs, all at once or one after the other; seeds default to the place in the list."""
    results: dict[str, Result] = {}
    for place, (prompt, params) in enumerate(work):
        request_id = f"r{place}"
        results[request_id] = Result()
        seed = params.seed if params.seed is not None else place
        engine.add_request(NewRequest(request_id, list(prompt), params, seed, **fields))
        if not together:
            finish(engine, results, check)
    finish(engine, results, check)
    return list(results.values())


def finish(engine: Engine, results: Mapping[str, Result], check: bool = True) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            assert engine.scheduler.target.num_used == 0, "idle, yet blocks are held"
            return
        for output in engine.step().outputs:
            results[output.request_id].add(output)
        if check:
            engine.scheduler.check_integrity()
    raise AssertionError("the engine does not come to an end")


def prompts(count: int, *, seed: int = 0, shortest: int = 3, longest: int = 60) -> list[list[int]]:
    """Random prompts; every other one repeats itself, so that n-grams have something to find."""
    rng = random.Random(seed)
    made = []
    for place in range(count):
        length = rng.randint(shortest, longest)
        unit = [rng.randrange(3, VOCAB_SIZE) for _ in range(max(2, length // (4 if place % 2 else 1)))]
        made.append((unit * 5)[:length])
    return made


def oracle(texts: Mapping[tuple[int, ...], Sequence[int]]) -> Callable[[Request, int], list[int]]:
    """A function that knows each prompt's right continuation: (request, length) -> its next tokens."""

    def continuation(request: Request, length: int) -> list[int]:
        text = texts[tuple(request.token_ids[: request.num_prompt_tokens])]
        start = request.num_output_tokens
        return list(text[start : start + length])

    return continuation


def chain(tokens: Sequence[int]) -> RequestDraft:
    return RequestDraft(list(tokens), "scripted")
