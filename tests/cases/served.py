"""Engines on T with the drafts that the cases ask for; also built inside a core process, so nothing heavy is imported.

`SelfDraft` is "S" of the cases: the draft path is the target's own path, so every drafted token stands.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec

from forerun.engine.build import build_engine
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.messages import NewRequest
from forerun.models.tokenizer import Tokenizer
from forerun.request import Request
from forerun.spec.control import FixedLength
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer, ScriptedTarget

REFERENCE_CACHE_BYTES = 1 << 20


class SelfDraft:
    """Drafts what the target itself says next, greedy or sampled, past every stop: an engine of its own asks it."""

    def __init__(self, model: str) -> None:
        self._engine = build_engine(EngineConfig(model=model, kv_cache_memory_bytes=REFERENCE_CACHE_BYTES))
        self._texts: dict[tuple[Any, ...], list[int]] = {}

    def __call__(self, request: Request, length: int) -> RequestDraft:
        start = request.num_output_tokens
        return RequestDraft(self._text(request)[start : start + length], "self")

    def _text(self, request: Request) -> list[int]:
        params = dataclasses.replace(
            request.params,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            stop=(),
            stop_token_ids=(),
            logprobs=None,
        )
        prompt = request.token_ids[: request.num_prompt_tokens]
        key = (tuple(prompt), params, None if params.greedy else (request.seed, request.choice))
        if key not in self._texts:
            self._engine.add_request(NewRequest("self", prompt, params, request.seed, choice=request.choice))
            text = self._texts[key] = []
            while self._engine.has_work:
                for output in self._engine.step().outputs:
                    text += output.token_ids
        return self._texts[key]


def use_self_draft(engine: Engine, model: str, length: int) -> ScriptedProposer:
    """Put S in the proposer's place, drafting `length` tokens, with the figures of a method that is configured."""
    proposer = ScriptedProposer(SelfDraft(model))
    engine.proposer = proposer
    engine.scheduler.on_release = proposer.forget
    engine.control = FixedLength(length)
    config = {"method": "self", "num_speculative_tokens": length}
    engine._info = msgspec.structs.replace(engine._info, speculative_config=config, num_spec_tokens=length)
    return proposer


def use_loop(engine: Engine, loop: list[int]) -> None:
    """Put a model in the target's place that says `loop` over and over: after position p comes loop[p + 1]."""
    engine.runner.target.model = ScriptedTarget(
        lambda _, position: loop[(position + 1) % len(loop)], engine.info().vocab_size
    )


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """The id of the token for each single byte."""
    singles = ((tokenizer.token_bytes(i), i) for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i))
    ids: dict[int, int] = {}
    for data, token_id in singles:
        if len(data) == 1:
            ids.setdefault(data[0], token_id)
    return ids


def build_served(
    config: EngineConfig, *, model: str, log: str, self_draft: int = 0, loop: bytes | None = None
) -> Engine:
    """What a core process runs: the engine for `model`; all that the process says on stderr goes to the file `log`."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 2)
    os.close(target)
    engine = build_engine(dataclasses.replace(config, model=str(Path(model))))
    if self_draft:
        use_self_draft(engine, model, self_draft)
    if loop is not None:
        ids = byte_ids(engine.outputs.tokenizer)
        use_loop(engine, [ids[byte] for byte in loop])
    return engine
