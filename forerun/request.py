"""A request: what was asked, what is known of it, and how far it has been computed. No torch here."""

from __future__ import annotations

import enum
import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from forerun.errors import RequestError
from forerun.structured.request import StructuredOutputs

MAX_LOGPROBS = 20
MAX_CHOICES = 128  # answers to one prompt; OpenAI's limit
MAX_STOP_STRINGS = 64
SEED_BITS = 64
DRAWN_SEED_BITS = 53  # of seeds that are drawn: every client's numbers can hold and send them back
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0
MAX_BIAS = 100.0
MAX_COUNT = 2**31 - 1  # of tokens: what a message can hold
MAX_BAD_WORDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
_PLURALS = {"stop": "stop strings", "bad_words": "bad_words"}


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


def _ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids; None for none."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list of token ids, got {value!r:.80}", name)
    return tuple(cast(int, _whole(name, token_id)) for token_id in value)


def _bias(value: object) -> dict[int, float] | None:
    """Token id to what is added to its logit. JSON has text for keys, so that counts as a number; {} is None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must be an object of token ids and numbers, got {value!r:.80}", "logit_bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise RequestError(f"logit_bias must have token ids for keys, got {key!r:.80}", "logit_bias")
        bias[operator.index(number)] = _real("logit_bias", amount)
    for token_id, amount in bias.items():
        if not -MAX_BIAS <= amount <= MAX_BIAS:
            limits = f"[-{MAX_BIAS:g}, {MAX_BIAS:g}]"
            raise RequestError(f"logit_bias of token id {token_id} must be in {limits}, got {amount:g}", "logit_bias")
    return bias or None


class TruncationSide(enum.StrEnum):
    """Which end of a prompt that is too long is cut off."""

    LEFT = "left"
    RIGHT = "right"


# Fields that are numbers, with their ranges; None: no upper bound.
_WHOLE: dict[str, tuple[int, int | None]] = {
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "top_k": (-1, None),
    "seed": (-(2 ** (SEED_BITS - 1)), None),
    "max_tokens": (1, None),
    "min_tokens": (0, MAX_COUNT),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "truncate_prompt_tokens": (-1, MAX_COUNT),
    "thinking_token_budget": (-1, MAX_COUNT),
}
_NEVER_ABSENT = ("n", "top_k", "min_tokens")
_REAL: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to stop. Names, ranges and defaults are OpenAI's and vLLM's (docs/sampling.md).

    All that changes a token's chances is a function of the tokens before it, drafted ones included, so that speculation
    changes nothing: logit_bias, allowed_token_ids, bad_words, min_tokens, the registered logits processors, the
    penalties and the thinking budget, in this order; then temperature, min_p, top_k and top_p.

    Attributes:
        n: answers to the prompt, at most `MAX_CHOICES`. Each draws its own noise from the one seed, and the first is
            the answer of n=1; greedy ones are equal.
        best_of: answers that are made, at least n; the n with the highest log-probability, summed over their tokens,
            are given. None: n.
        temperature: 0 is greedy; otherwise logits are divided by it, by 0.01 at the least.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: keep tokens that have at least this share of the likeliest one's probability; 0 keeps all.
        presence_penalty: subtracted from the logits of tokens that the output holds, in [-2, 2].
        frequency_penalty: the same, times how often the output holds them.
        repetition_penalty: logits of tokens that prompt or output hold are divided by it where they are positive, and
            multiplied elsewhere; above 0, and 1 changes nothing.
        logit_bias: token id -> what is added to its logit, in [-100, 100]; None for none.
        allowed_token_ids: no other tokens; None allows all.
        bad_words: texts whose tokens must not come one after the other in the output, with a space before them or
            without.
        min_tokens: so many tokens come before any end token or stop token id; no stop string ends the text before.
        seed: fixes every draw of the request; None draws one when the request arrives, and it is returned.
        max_tokens: most tokens to generate; None means up to the model's length.
        stop: strings that end the text; the text ends before the string unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the text, beside the model's own end tokens.
        ignore_eos: go on past the model's own end tokens (`stop_token_ids` still count).
        logprobs: None for none; n for the drawn token's and the n most likely ones' log-probabilities, taken from
            the raw distribution (before all of the above).
        logprob_token_ids: the log-probabilities of these tokens instead of the most likely ones'.
        prompt_logprobs: as `logprobs`, of the prompt's tokens but the first. The prefix cache is not read then.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: keep the space that some decoders (WordPiece) write between special tokens.
        truncate_prompt_tokens: a longer prompt is cut to so many tokens; -1: to what leaves room for max_tokens.
        truncation_side: the end of the prompt that is cut off.
        thinking_token_budget: when reasoning has lasted so many tokens, its end tag is written; None or -1: no bound.
        extra_args: what the registered logits processors are given (`vllm_xargs` in a request body).
        speculative_config: how this request may draft: `num_speculative_tokens` up to the engine's K (0: off) and
            `method`, one or several of those loaded, or "none", and a stricter `rejection_sample_method`
            (docs/speculative-config.md). The front that takes the
            request checks it against the engine and turns it into fields of `NewRequest`.
        structured_outputs: the form that the text must have, one of `json` (a schema), `json_object`, `regex`,
            `choice`, `grammar` and `structural_tag` (docs/structured-output.md). It is kept in its plainest form.

    Raises:
        RequestError: a value out of range; `param` names the field.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = TruncationSide.LEFT
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)
    speculative_config: Mapping[str, Any] | None = field(default=None, hash=False)
    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        self._take()
        self._check_ranges()
        self._check_lists()
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of must be at least n, which is {self.n}, got {self.best_of}", "best_of")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens, which is {self.max_tokens}, got {self.min_tokens}",
                "min_tokens",
            )
        if 0.0 < self.temperature < MIN_TEMPERATURE:  # logits divided by less overflow
            self._set("temperature", MIN_TEMPERATURE)
        if self.thinking_token_budget == -1:
            self._set("thinking_token_budget", None)

    def _take(self) -> None:
        """Values in their own types: what was given may be numpy's, lists, or None for nothing."""
        for name in (*_REAL, "top_p", "repetition_penalty"):
            self._set(name, _real(name, getattr(self, name)))
        for name in _WHOLE:
            self._set(name, _whole(name, getattr(self, name), optional=name not in _NEVER_ABSENT))
        for name in ("stop", "bad_words"):
            self._set(name, _texts(name, getattr(self, name)))
        for name in ("stop_token_ids", "logprob_token_ids"):
            self._set(name, _ids(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        self._set("logit_bias", _bias(self.logit_bias))
        if self.truncation_side not in tuple(TruncationSide):
            raise RequestError(
                f"truncation_side must be 'left' or 'right', got {self.truncation_side!r:.80}", "truncation_side"
            )
        self._set("truncation_side", TruncationSide(self.truncation_side))

    def _check_ranges(self) -> None:
        for name, (low, high) in _REAL.items():
            if not low <= getattr(self, name) <= high:
                raise RequestError(f"{name} must be in [{low:g}, {high:g}], got {getattr(self, name)}", name)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise RequestError(
                f"repetition_penalty must be above 0, got {self.repetition_penalty}", "repetition_penalty"
            )
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1 or 0 (off) or at least 1, got {self.top_k}", "top_k")
        if self.seed is not None and not -(2 ** (SEED_BITS - 1)) <= self.seed < 2**SEED_BITS:
            raise RequestError(f"seed must fit into {SEED_BITS} bits, got {self.seed}", "seed")
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be at least 1, or -1 for what max_tokens leaves, got 0",
                "truncate_prompt_tokens",
            )
        for name, (least, most) in _WHOLE.items():
            value = getattr(self, name)
            if value is not None and (value < least or (most is not None and value > most)):
                allowed = f"at least {least}" if most is None else f"in [{least}, {most}]"
                raise RequestError(f"{name} must be {allowed}, got {value}", name)

    def _check_lists(self) -> None:
        for name, limit in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            texts = getattr(self, name)
            if len(texts) > limit:
                raise RequestError(f"at most {limit} {_PLURALS[name]}, got {len(texts)}", name)
            if empty := [
                place for place, text in enumerate(texts) if not text.strip() and (name != "stop" or not text)
            ]:
                raise RequestError(f"{name}[{empty[0]}] must not be empty", name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty: no token could be drawn", "allowed_token_ids")
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"at most {MAX_LOGPROB_TOKEN_IDS} logprob_token_ids, got {len(self.logprob_token_ids)}",
                "logprob_token_ids",
            )
        for name in ("speculative_config", "extra_args"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise RequestError(f"{name} must be an object, got {value!r:.80}", name)
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.parse(self.structured_outputs).as_dict())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """Whether tokens are left out of the distribution that is drawn from."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def num_answers(self) -> int:
        """Answers that are made: n of them are given."""
        return self.n if self.best_of is None else self.best_of

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def for_engine(self) -> SamplingParams:
        """With what the front needs beside: the best of several answers are known by their log-probabilities."""
        if self.num_answers == self.n or self.wants_logprobs:
            return self
        return replace(self, logprobs=0)

    def cut_prompt(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """The prompt, cut as `truncate_prompt_tokens` says.

        Raises:
            RequestError: max_tokens leave no room for a prompt.
        """
        limit = self.truncate_prompt_tokens
        if limit == -1:
            limit = max_model_len - (self.max_tokens or 1)
            if limit < 1:
                raise RequestError(
                    f"truncate_prompt_tokens=-1 leaves no prompt: max_model_len is {max_model_len}, max_tokens "
                    f"{self.max_tokens}",
                    "truncate_prompt_tokens",
                )
        if limit is None or len(token_ids) <= limit:
            return token_ids
        return token_ids[-limit:] if self.truncation_side is TruncationSide.LEFT else token_ids[:limit]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Whether all token ids are the model's.

        Raises:
            RequestError: the first that is not.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            ids: Iterable[int] = getattr(self, name) or ()
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(f"{name}: token id {token_id} is not in the vocabulary [0, {vocab_size})", name)


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
    num_loosely_accepted_tokens: int = 0  # of them, those that the target's own rule had rejected: lossy rules only
    rejection_sample_method: str = "match"
    lossless: str = "path"
    acceptance_histogram: list[int] = field(default_factory=list)  # steps that accepted exactly 0..K tokens
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)

    def observe(self, num_drafted: int, num_accepted: int, num_loose: int = 0) -> None:
        if num_drafted == 0:
            return
        self.num_spec_steps += 1
        self.num_loosely_accepted_tokens += num_loose
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
            "rejection_sample_method": self.rejection_sample_method,
            "lossless": self.lossless,
            "num_loosely_accepted_tokens": self.num_loosely_accepted_tokens,
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
    """One sequence inside the engine. Only `Scheduler` changes it, and only in its calls of a step.

    `token_ids` holds the prompt and what was generated; `num_computed_tokens` of them have their KV in the target's
    cache. A step closes the gap. Tokens on trial (drafts) are never in `token_ids`: they live in the step's plan.

    While a step is in flight (launched, and not read yet), `num_in_flight` tokens may come of it, or fewer: what is
    planned meanwhile is planned for the most.
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
    rejection_sample_method: str = ""  # the rule that judges its drafts; "": the server's
    arrival: int = 0  # order of arrival: the last to come is the first to be preempted
    arrival_time: float = field(default_factory=time.monotonic)

    slot: int = -1  # of the device's tables, while it runs
    num_in_flight: int = 0  # tokens that steps in flight may bring, at most
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
    def wants_prompt_logprobs(self) -> bool:
        """Every row of the prompt is to be computed and looked at, so that none may come from the prefix cache."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def decoding(self) -> bool:
        """The prompt is computed: one token, known or in flight, is left to compute, and a draft may follow it."""
        return self.num_in_flight > 0 or self.num_computed_tokens == self.num_tokens - 1

    @property
    def most_tokens(self) -> int:
        """Known tokens, with all that are in flight."""
        return len(self.token_ids) + self.num_in_flight

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
        """Tokens that may still come, at least, beside those in flight."""
        return self.max_tokens - self.num_output_tokens - self.num_in_flight
