"""Request bodies: the fields that are served, their types and bounds, and what they mean for sampling.

Types are strict (no "0.5" for a number). Ranges of sampling values are judged in one place, `SamplingParams`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from forerun.errors import RequestError
from forerun.request import MAX_LOGPROBS, MIN_TEMPERATURE, SamplingParams
from forerun.server.fields import CHAT_NOT_SERVED, COMPLETION_NOT_SERVED, Neutral, served_fields, shorten
from forerun.server.structured import asked_form, named
from forerun.spec.per_request import RequestSpeculation, request_speculation

logger = logging.getLogger("forerun.server")

MAX_STOP_LENGTH = 1024  # characters; how much text a stream may hold back
MAX_STOP_TOKEN_IDS = 1024
MAX_TOOLS = 128  # OpenAI's limit
MAX_INT = 2**31 - 1  # larger limits mean no limit; they must fit into a message

StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    list[StopString],
    Field(fail_fast=True, description="text, or a list of texts"),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=str | list[str]),
]
Messages = Annotated[
    list[dict[str, Any]], Field(fail_fast=True)
]  # a fault an item, for a million items, would take seconds
Name = Annotated[str, Field(max_length=256)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]

# Fields that `SamplingParams` knows by the same name, and judges; those that a request leaves out have their defaults
# there, or in the model's generation_config.json.
SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__) - {"max_tokens", "logprobs", "speculative_config"}


class Body(BaseModel):
    """A request body. `NOT_SERVED` are the fields that it knows and refuses."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    NOT_SERVED: ClassVar[Mapping[str, Neutral]] = {}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """
        Raises:
            RequestError: names the field that is wrong.
        """
        try:
            return cls.model_validate(served_fields(content, cls.model_fields, cls.NOT_SERVED))
        except ValidationError as error:
            raise _first_error(error) from None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], Field(fail_fast=True, description="token id to what is added")] = {}
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopString], Field(fail_fast=True)] = []
    min_tokens: int = 0
    seed: int | None = None
    stop: Stops = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprob_token_ids: TokenIds = []
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    thinking_token_budget: int | None = None
    vllm_xargs: Annotated[dict[str, Any], Field(description="for the server's own logits processors")] = {}
    # Ours: how this request may draft, judged against what the server has loaded; and its older, shorter form.
    speculative_config: Annotated[
        dict[str, Any] | None,
        Field(
            description="num_speculative_tokens (0: off), method (a name, a list of names, or none) and "
            "rejection_sample_method (the server's, or a stricter one)"
        ),
    ] = None
    max_draft_tokens: Annotated[int | None, Field(ge=0, le=1024)] = None
    # The form of the answer: OpenAI's field, vLLM's, and vLLM's older ones.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, Field(fail_fast=True)] = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Name | None = None  # there is one
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    request_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream_interval: Annotated[int, Field(ge=1)] = 1  # tokens that a chunk of a stream waits for, after the first
    # Who asks, for the caller's own records. No answer depends on them.
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Name], Field(max_length=16)] = {}

    @property
    def echoes(self) -> bool:
        """Whether the prompt is shown before the answer."""
        return False

    def sampling(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """
        Args:
            defaults: values for fields that the request leaves out, from the model's generation_config.json.
        Raises:
            RequestError: a value out of range, or fields that contradict each other.
        """
        self._check_stream()
        _warn_of_temperature(self.temperature)
        given = {name: getattr(self, name) for name in self.model_fields_set & SAMPLING_FIELDS}
        limit = self.token_limit()
        if self.vllm_xargs:
            given["extra_args"] = _sendable("vllm_xargs", self.vllm_xargs)
        if "top_k" in given:
            given["top_k"] = min(self.top_k, MAX_INT)
        field, given["structured_outputs"] = asked_form(self) or ("", None)
        with named(field):
            return SamplingParams(
                **{
                    **defaults,
                    **given,
                    "max_tokens": None if limit is None else min(limit, MAX_INT),
                    "logprobs": self.num_logprobs(),
                    "prompt_logprobs": self.num_prompt_logprobs(),
                }
            )

    def _check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", "stream_options")
        if not self.stream:
            return
        for name, asked in (
            ("prompt_logprobs", self.prompt_logprobs is not None),
            ("best_of", self.best_of not in (None, self.n)),
            ("use_beam_search", self.use_beam_search),
        ):
            if asked:
                raise RequestError(f"{name}={shorten(getattr(self, name))} cannot be streamed: send stream=false", name)

    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def speculation(self, methods: Sequence[str], num_speculative_tokens: int, rule: str) -> RequestSpeculation:
        """How the request may draft, on a server with these methods, this K and this rule.

        Raises:
            RequestError: a method that is not loaded, too many tokens, a looser rule, or a key that nobody knows.
        """
        if self.max_draft_tokens is None:
            return request_speculation(self.speculative_config, methods, num_speculative_tokens, rule)
        if self.speculative_config is not None:
            raise RequestError("speculative_config and max_draft_tokens exclude each other", "max_draft_tokens")
        return RequestSpeculation(self.max_draft_tokens)

    def token_limit(self) -> int | None:
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        raise NotImplementedError


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    NOT_SERVED: ClassVar[Mapping[str, Neutral]] = COMPLETION_NOT_SERVED

    prompt: Annotated[Any, Field(description="text, token ids, or a list of either", json_schema_extra={"anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]})]  # fmt: skip
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def echoes(self) -> bool:
        return self.echo

    def num_prompt_logprobs(self) -> int | None:
        """An echo has its log-probabilities where the answer has."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs

    def token_limit(self) -> int | None:
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["function"]
    function: FunctionDefinition


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as templates take them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    NOT_SERVED: ClassVar[Mapping[str, Neutral]] = CHAT_NOT_SERVED

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Annotated[
        Any,
        Field(description="none, auto, required, or {type: function, function: {name}}; auto where there are tools"),
    ] = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: Annotated[str | None, Field(max_length=32)] = None

    def token_limit(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_completion_tokens < 1:
            raise RequestError(
                f"max_completion_tokens must be at least 1, got {self.max_completion_tokens}", "max_completion_tokens"
            )
        return self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        if not self.logprobs and self.top_logprobs != 0:
            raise RequestError(f"top_logprobs={self.top_logprobs} needs logprobs=true", "top_logprobs")
        if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {self.top_logprobs}", "top_logprobs")
        return self.top_logprobs if self.logprobs else None


class TokenizeBody(Body):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


def _sendable(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """What a user may write as he likes must reach the engine.

    Raises:
        RequestError: it holds numbers or text that no message can.
    """
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"{name} cannot be used: {error}", name) from error
    return value


_warned_temperature = False


def _warn_of_temperature(temperature: float) -> None:
    global _warned_temperature
    if 0.0 < temperature < MIN_TEMPERATURE and not _warned_temperature:
        _warned_temperature = True
        logger.warning("temperature=%g is raised to %g; 0 is greedy (said once)", temperature, MIN_TEMPERATURE)


def _first_error(error: ValidationError) -> RequestError:
    """The first thing that pydantic found, in one line that names the field."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "body"
    # What follows the field is an index or a key of the user's, or the name of a member of a union.
    path = name + "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    if name in ("stream_options", "tools"):  # their keys are ours, but for one that is unknown
        path = name + "".join(f"[{p}]" if isinstance(p, int) else f".{str(p)[:100]}" for p in first["loc"][1:])
    if first["type"] == "missing":
        return RequestError(f"{path} is missing", path)
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field {path!r}", path)
    return RequestError(f"{path}: {first['msg'][0].lower()}{first['msg'][1:]}, got {shorten(first['input'])}", path)
