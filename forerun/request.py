"""A request: what was asked, what is known of it, and how far it has been computed. No torch here."""

from __future__ import annotations

import enum
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import RequestError
from forerun.structured.request import StructuredOutputs

MAX_LOGPROBS = 20
MAX_CHOICES = 128  # answers to one prompt; OpenAI's limit
MAX_STOP_STRINGS = 64
SEED_BITS = 64
DRAWN_SEED_BITS = 53  # of seeds that are drawn: every client's numbers can hold and send them back
MIN_TEMPERATURE = 0.01


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine could not go on with this request


def _whole(name: str, value: object, *, optional: bool = False) -> int | None:
    """A whole number, numpy's too; a bool or a fraction is none."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RequestError(f"{name} must be a whole number, got {value!r}", name)
    return operator.index(value)


def _real(name: str, value: object) -> float:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise RequestError(f"{name} must be a number, got {value!r}", name)
    return float(value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    """A text or several; None for none."""
    if value is None:
        return ()
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence | frozenset | set) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts, got {value!r}", name)
    return tuple(texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to stop. Names and defaults are OpenAI's and vLLM's.

    Attributes:
        n: answers to the prompt, at most `MAX_CHOICES`. Each draws its own noise from the one seed, and the first is
            the answer of n=1; greedy ones are equal.
        temperature: 0 is greedy; otherwise logits are divided by it, by 0.01 at the least.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        seed: fixes every draw of the request; None draws one when the request arrives, and it is returned.
        max_tokens: most tokens to generate; None means up to the model's length.
        stop: strings that end the text; the text ends before the string unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the text, beside the model's own end tokens.
        ignore_eos: go on past the model's own end tokens (`stop_token_ids` still count).
        logprobs: None for none; n for the drawn token's and the n most likely ones' log-probabilities, taken from
            the raw distribution (before temperature and filters).
        skip_special_tokens: leave special tokens out of the text.
        speculative_config: how this request may draft: `num_speculative_tokens` up to the engine's K (0: off) and
            `method`, one or several of those loaded, or "none" (docs/speculative-config.md). The front that takes the
            request checks it against the engine and turns it into fields of `NewRequest`.
        structured_outputs: the form that the text must have, one of `json` (a schema), `json_object`, `regex`,
            `choice`, `grammar` and `structural_tag` (docs/structured-output.md). It is kept in its plainest form.

    Raises:
        RequestError: a value out of range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    speculative_config: Mapping[str, Any] | None = field(default=None, hash=False)
    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, _real(name, getattr(self, name)))
        for name in ("n", "top_k", "seed", "max_tokens", "logprobs"):
            optional = name not in ("n", "top_k")
            object.__setattr__(self, name, _whole(name, getattr(self, name), optional=optional))
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        object.__setattr__(self, "stop_token_ids", tuple(_whole("stop_token_ids", i) for i in ids))
        if not 1 <= self.n <= MAX_CHOICES:
            raise RequestError(f"n must be in [1, {MAX_CHOICES}], got {self.n}", "n")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise RequestError(f"temperature must be in [0, 100], got {self.temperature}", "temperature")
        if 0.0 < self.temperature < MIN_TEMPERATURE:  # logits divided by less overflow
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1 or 0 (off) or at least 1, got {self.top_k}", "top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        if self.seed is not None and not -(2 ** (SEED_BITS - 1)) <= self.seed < 2**SEED_BITS:
            raise RequestError(f"seed must fit into {SEED_BITS} bits, got {self.seed}", "seed")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}", "logprobs")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop")
        if self.speculative_config is not None and not isinstance(self.speculative_config, Mapping):
            raise RequestError(
                f"speculative_config must be an object, got {self.speculative_config!r:.80}", "speculative_config"
            )
        if self.structured_outputs is not None:
            plain = StructuredOutputs.parse(self.structured_outputs).as_dict()
            object.__setattr__(self, "structured_outputs", plain)
        if "" in self.stop:
            raise RequestError(f"stop[{self.stop.index('')}] must not be empty", "stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(slots=True)
class SpecStats:
    """What speculation did for one request; field names are those of the responses' `metrics`.

    A step counts when at least one drafted token was verified in it. Drafts are cut to what max_tokens and the
    model's length leave *before* they are made, so `num_draft_tokens` holds only tokens that could have been kept.
    A stop inside an accepted draft counts the tokens up to the stop.
    """

    num_spec_tokens: int = 0  # K
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # steps that accepted exactly 0..K tokens
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_draft_tokens += num_accepted
        self.acceptance_histogram.extend([0] * (num_accepted + 1 - len(self.acceptance_histogram)))
        self.acceptance_histogram[num_accepted] += 1
        self.per_step_accepted.append(num_accepted)
        self.per_step_drafted.append(num_drafted)

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def as_dict(self, *, detailed: bool = False) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram
            + [0] * (self.num_spec_tokens + 1 - len(self.acceptance_histogram)),
            "num_spec_steps": self.num_spec_steps,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if detailed:
            summary["per_step_accepted"] = self.per_step_accepted
            summary["per_step_drafted"] = self.per_step_drafted
        return summary


@dataclass(slots=True)
class RequestCache:
    """What a request holds of one cache group.

    Attributes:
        blocks: block ids, in the order of the tokens.
        num_tokens: of the request's known tokens, those whose keys and values are there: the first so many.
        num_published: full blocks that other requests can find.
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_published: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence inside the engine. Only `Scheduler` changes it, and only in `schedule`, `reserve` and `commit`.

    `token_ids` holds the prompt and what was generated; `num_computed_tokens` of them have their KV in the target's
    cache. A step closes the gap. Tokens on trial (drafts) are never in `token_ids`: they live in the step's plan.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice: int = 0  # index among the n answers to one prompt; keys the noise
    cache_salt: str = ""  # prefixes are shared only between requests of one salt
    max_tokens: int = 16  # params.max_tokens, cut to what the model's length leaves
    eos_token_ids: frozenset[int] = frozenset()
    max_draft_tokens: int | None = None  # the request's own bound on drafts; 0 switches them off
    draft_methods: tuple[str, ...] | None = None  # the methods that may draft for it; None: all
    arrival: int = 0  # order of arrival: the last to come is the first to be preempted
    arrival_time: float = field(default_factory=time.monotonic)

    caches: list[RequestCache] = field(default_factory=lambda: [RequestCache()])  # one a group, the target's first
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache at the first admission
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    spec: SpecStats = field(default_factory=SpecStats)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the target's cache."""
        return self.caches[0].num_tokens

    @property
    def decoding(self) -> bool:
        """The prompt is computed: one known token is left to compute, and a draft may follow it."""
        return self.num_computed_tokens == self.num_tokens - 1

    def may_draft_with(self, method: str) -> bool:
        return self.draft_methods is None or method in self.draft_methods

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def remaining_tokens(self) -> int:
        return self.max_tokens - self.num_output_tokens
