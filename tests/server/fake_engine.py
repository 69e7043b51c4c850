"""An engine without a model, for tests of what stands around it; and a tokenizer of bytes.

The answer to any prompt is the alphabet over and over, `burst` letters a step. What the prompt's text begins with makes
the engine misbehave:

    !reject  it is refused when it is added          !die     the core process is killed in the second step
    !fail    it ends with an error in its second step  !raise   the second step raises
    !hold    text comes a step later than tokens      !broken  adding it raises something unforeseen

A chat in which the user or a tool says "!say TEXT" is answered by TEXT, the last of them.
"""

from __future__ import annotations

import codecs
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from forerun.engine.config import EngineConfig
from forerun.engine.core import EngineFactory
from forerun.engine.messages import (
    EngineInfo,
    EngineStats,
    NewRequest,
    RequestMetrics,
    RequestOutput,
    StepOutput,
)
from forerun.errors import ConfigError, RequestError
from forerun.request import FinishReason, SpecStats
from forerun.spec.rules import LOSSLESS
from forerun.spec.stats import NOT_DRAFTED, SpecTotals
from forerun.spec.verifier import TokenLogprobs

VOCAB_SIZE = 256
MAX_MODEL_LEN = 512
NUM_BLOCKS = 64
NUM_SPEC_TOKENS = 4
SPEC_METHODS = ("suffix", "ngram")


SAY = re.compile(r"!say (.*?)\|(?:user|tool)\n", re.DOTALL)


def letter(position: int) -> int:
    return ord("a") + position % 26


def answer_text(num_tokens: int) -> str:
    return "".join(chr(letter(i)) for i in range(num_tokens))


@dataclass
class FakeRequest:
    new: NewRequest
    script: str
    num_steps: int = 0
    num_tokens: int = 0
    held: str = ""
    said: bytes | None = None  # the answer; None: the alphabet
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    spec: SpecStats = field(default_factory=lambda: SpecStats(num_spec_tokens=NUM_SPEC_TOKENS))

    @property
    def limit(self) -> int:
        room = MAX_MODEL_LEN - len(self.new.prompt_token_ids)
        return min(self.new.params.max_tokens or room, room, room if self.said is None else len(self.said))

    def next_tokens(self, count: int) -> list[int]:
        start = self.num_tokens
        return list(self.said[start : start + count]) if self.said else [letter(start + i) for i in range(count)]


class FakeEngine:
    def __init__(self, config: EngineConfig, *, step_s: float, burst: int, speculation: bool, rule: str) -> None:
        if config.model == "broken":
            raise ConfigError("model 'broken': tensor model.norm.weight is missing")
        if config.model == "slow":
            time.sleep(60)
        if config.model == "crash":
            raise ValueError("no\nsuch luck")
        self._config = config
        self._step_s = step_s
        self._burst = burst
        self._speculation = speculation
        self._rule = rule
        self._requests: dict[str, FakeRequest] = {}
        times = {"suffix": 0.0, "ngram": 0.0} if speculation else {}
        not_drafted = dict.fromkeys(NOT_DRAFTED, 0) if speculation else {}
        self._stats = EngineStats(num_blocks=NUM_BLOCKS, draft_time_by_proposer=times, not_drafted=not_drafted)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add_request(self, new: NewRequest) -> None:
        script = bytes(new.prompt_token_ids[:8]).decode("latin-1")
        if script.startswith("!reject"):
            raise RequestError("the engine does not like this prompt", "prompt")
        if script.startswith("!broken"):
            raise KeyError("/some/path")
        said = SAY.findall(bytes(new.prompt_token_ids).decode("utf-8", "replace"))
        self._requests[new.request_id] = FakeRequest(new, script, said=said[-1].encode() if said else None)
        self._stats.prompt_tokens += len(new.prompt_token_ids)
        self._stats.prefix_cache_queries += len(new.prompt_token_ids)

    def abort_requests(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._requests.pop(request_id, None)

    def step(self) -> StepOutput:
        time.sleep(self._step_s)
        self._stats.num_steps += 1
        outputs = [self._advance(request) for request in list(self._requests.values())]
        return StepOutput(outputs, self.stats())

    def stats(self) -> EngineStats:
        self._stats.num_requests_running = len(self._requests)
        self._stats.num_blocks_used = min(NUM_BLOCKS, len(self._requests))
        return self._stats

    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self._config.model,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self._config.settle(None).max_num_seqs,
            max_num_batched_tokens=self._config.settle(None).max_num_batched_tokens,
            block_size=16,
            num_blocks=NUM_BLOCKS,
            kv_cache_tokens=NUM_BLOCKS * 16,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            device="cpu",
            load_time_s=0.0,
            speculative_config={"method": "ngram", "num_speculative_tokens": 4} if self._speculation else None,
            num_spec_tokens=NUM_SPEC_TOKENS if self._speculation else 0,
            spec_methods=SPEC_METHODS if self._speculation else (),
            rejection_sample_method=self._rule,
            lossless=LOSSLESS[self._rule],
            log_lines=["CPU KV cache size: 1,024 tokens"],
        )

    def _advance(self, request: FakeRequest) -> RequestOutput:
        request.num_steps += 1
        if request.num_steps == 2:
            self._misbehave(request)
        drafted = NUM_SPEC_TOKENS if self._speculation and request.num_steps > 1 else 0
        self._stats.num_rows += 1 + drafted if request.num_steps > 1 else len(request.new.prompt_token_ids)
        count = min(self._burst, request.limit - request.num_tokens)
        tokens = request.next_tokens(count)
        request.num_tokens += count
        self._stats.generation_tokens += count
        if self._speculation and request.num_steps > 1:
            request.spec.rejection_sample_method = request.new.rejection_sample_method or self._rule
            request.spec.lossless = LOSSLESS[request.spec.rejection_sample_method]
            num_loose = int(request.spec.lossless == "no")
            request.spec.observe(NUM_SPEC_TOKENS, count - 1, num_loose)
            for totals in (self._stats.spec, self._stats.spec_by_proposer.setdefault("ngram", SpecTotals())):
                totals.observe(NUM_SPEC_TOKENS, count - 1, num_loose)
        output = RequestOutput(request.new.request_id, tokens, request.decoder.decode(bytes(tokens)))
        output.drafted = [True] * (count - 1) + [False]
        if request.new.params.logprobs is not None:
            output.logprobs = [_logprobs(token, request.new.params.logprobs) for token in tokens]
        if request.script.startswith("!hold"):
            request.held, output.text = output.text, request.held
        if request.num_steps == 2 and request.script.startswith("!fail"):
            del self._requests[request.new.request_id]
            return RequestOutput(request.new.request_id, finish_reason=FinishReason.ERROR, error="NaN in /the/logits")
        if request.num_tokens >= request.limit:
            self._finish(request, output)
        return output

    def _misbehave(self, request: FakeRequest) -> None:
        if request.script.startswith("!die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if request.script.startswith("!raise"):
            raise ZeroDivisionError("the device\nis on fire: /dev/nvidia0")

    def _finish(self, request: FakeRequest, output: RequestOutput) -> None:
        del self._requests[request.new.request_id]
        output.text += request.held
        whole = request.said is not None and request.num_tokens == len(request.said)
        output.finish_reason = FinishReason.STOP if whole else FinishReason.LENGTH
        spec = request.spec.as_dict(detailed=True) if self._speculation else None
        output.metrics = RequestMetrics(0.001, 0.002, 0.003, 0, spec)


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    top = [(ord("A") + i, -0.5 - i) for i in range(num_top)]
    return TokenLogprobs(token, -0.25, 1, top)


def make_fake_engine(config: EngineConfig, *, step_s: float, burst: int, speculation: bool, rule: str) -> FakeEngine:
    return FakeEngine(config, step_s=step_s, burst=burst, speculation=speculation, rule=rule)


def fake_factory(
    *, step_s: float = 0.002, burst: int = 3, speculation: bool = True, rule: str = "match"
) -> EngineFactory:
    """What `EngineClient.start` takes; it is sent to the core process."""
    return partial(make_fake_engine, step_s=step_s, burst=burst, speculation=speculation, rule=rule)


def start_once(config: EngineConfig, mark: Path, *, hang: bool = False) -> FakeEngine:
    """Bind `mark`, a file to be made: then a factory of an engine that starts the first time only, and then fails, or
    takes a minute."""
    if mark.exists() and hang:
        time.sleep(60)
    if mark.exists():
        raise ConfigError("/models/gone: no such file")
    mark.touch()
    return FakeEngine(config, step_s=0.0, burst=1, speculation=False, rule="match")


def _written(message: dict[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    thoughts = [message["reasoning"]] if "reasoning" in message else []
    return "".join([*thoughts, message["content"] or "", *(f"{c['name']}{c['arguments']}" for c in calls)])


class ByteTokenizer:
    """A token a byte, no special tokens."""

    vocab_size = VOCAB_SIZE
    max_token_bytes = 1
    template_words = frozenset({"tools", "refuse", "enable_thinking"})
    eos_token_ids = frozenset({0})

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        if kwargs.get("refuse"):
            raise RequestError("the chat template refused: " + str(kwargs["refuse"]))
        text = "".join(f"{_written(m)}|{m['role']}\n" for m in messages)
        if kwargs.get("tools"):
            text = "+".join(tool["function"]["name"] for tool in kwargs["tools"]) + "|tools\n" + text
        opening = "assistant:" if kwargs.get("enable_thinking", True) else "assistant:</think>"
        return self.encode(text + (opening if add_generation_prompt else ""))

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return False
