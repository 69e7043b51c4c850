"""The offline front: text in, text out, in this process."""

from __future__ import annotations

import itertools
import logging
import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from forerun.beam import Beam, BeamSearch, BeamSearchParams
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.messages import EngineInfo, EngineStats, NewRequest, RequestMetrics
from forerun.engine.messages import RequestOutput as EngineOutput
from forerun.errors import ConfigError, RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.request import DRAWN_SEED_BITS, FinishReason, SamplingParams
from forerun.spec.config import SpeculativeConfig
from forerun.spec.per_request import RequestSpeculation, request_speculation
from forerun.spec.roles import assign_roles
from forerun.spec.verifier import TokenLogprobs

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: among the n answers to its prompt.
        token_ids: what was generated; an end token is the last of them, and not in the text.
        logprobs: one entry a token where asked for.
        error: why there is no more, where the finish reason is "error".
        drafted: for each token, whether it was drafted and accepted (False: drawn by the target).
        stop_reason: the stop string or stop token id that ended the text; None for the model's own end token.
        metrics: times, and `speculative_decoding`: acceptance figures (None without speculation).
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    drafted: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(slots=True)
class BeamSequence:
    """One continuation that beam search found: tokens and text of prompt and continuation, as vLLM gives them."""

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: FinishReason


@dataclass(slots=True)
class BeamSearchOutput:
    """What beam search found for a prompt, best first."""

    sequences: list[BeamSequence]


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its n answers; with `best_of`, those whose tokens are most likely together, best first.

    Attributes:
        prompt_logprobs: where asked for, one entry a token of the prompt; None for the first.
        seed: the one that was used, for all of them: with it the same texts come again.
        num_cached_tokens: of the prompt, those whose keys and values were in the cache before it came.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    seed: int
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def metrics(self) -> RequestMetrics | None:
        """Of the first answer; each has its own."""
        return self.outputs[0].metrics


class LLM:
    """A model with its engine in this process.

    Args:
        model: a directory in Hugging Face layout, a .gguf file or a built-in name (`smollm2-135m`). A speculators
            checkpoint serves its verifier, and drafts for it.
        speculative_config: keys as in docs/speculative-config.md; None: plain decoding.
        settings: any other field of `EngineConfig`.

    Raises:
        ConfigError: a setting or a file that cannot be used.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None = None,
        **settings: Any,
    ) -> None:
        unknown = settings.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(f"unknown setting {min(unknown)!r}: LLM takes the fields of EngineConfig")
        roles = assign_roles(model, speculative_config)
        if roles.note:
            logger.info("%s", roles.note)
        spec = roles.source
        if spec is not None and not isinstance(spec, SpeculativeConfig):
            spec = SpeculativeConfig.parse(spec)
        config = EngineConfig(model=roles.target, speculative_config=spec, **settings)
        self.engine = Engine.from_config(config)
        self.tokenizer: Tokenizer = self.engine.outputs.tokenizer
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info()

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them in one batch.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all, or one a prompt; None: `default_sampling_params`.
            speculation: False switches drafting off for this call, whatever `sampling_params` say.

        Raises:
            RequestError: a prompt or parameter that cannot be served; nothing is generated then.
        """
        batch = _as_batch(prompts)
        return self._run(
            [(p if isinstance(p, str) else None, self._encode(p)) for p in batch], sampling_params, speculation
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer conversations: one, or a list of them. `template` goes to the chat template."""
        batch = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        conversations = cast(Sequence[Sequence[Message]], batch)
        prompts = [self.tokenizer.apply_chat_template([dict(m) for m in c], **template) for c in conversations]
        return self._run([(None, ids) for ids in prompts], sampling_params, speculation)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """With the values of the model's generation_config.json, unless `generation_config` says otherwise."""
        return SamplingParams(**self.info.sampling_defaults)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt. Nothing is drafted: every request is for one token.

        Raises:
            RequestError: a prompt that cannot be served.
        """
        batch = [self._encode(prompt) for prompt in _as_batch(prompts)]
        searches = [BeamSearch(ids, params, self.info.eos_token_ids, self.info.max_model_len) for ids in batch]
        while pending := [(place, ids) for place, s in enumerate(searches) for ids in s.pending]:
            found = self._run([(None, ids) for _, ids in pending], params.one_token(), speculation=False)
            for place, s in enumerate(searches):
                own = [result.outputs[0] for (at, _), result in zip(pending, found, strict=True) if at == place]
                if own:
                    s.extend([entry for answer in own for entry in answer.logprobs or ()])
        return [
            BeamSearchOutput([self._sequence(ids, b) for b in s.best()]) for ids, s in zip(batch, searches, strict=True)
        ]

    def _sequence(self, prompt: list[int], beam: Beam) -> BeamSequence:
        tokens = prompt + beam.token_ids
        return BeamSequence(tokens, self.tokenizer.decode(tokens), beam.cumulative_logprob, beam.finish_reason)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if (
            isinstance(prompt, Mapping)
            or not isinstance(prompt, Iterable)
            or not all(hasattr(token, "__index__") for token in prompt)
        ):
            raise RequestError(f"a prompt must be a text or a list of token ids, got {prompt!r:.80}", "prompt")
        return [operator.index(token) for token in prompt]

    def _speculation(self, params: SamplingParams) -> RequestSpeculation:
        return request_speculation(params.speculative_config, self.info.spec_methods, self.info.num_spec_tokens)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        speculation: bool,
    ) -> list[RequestOutput]:
        params = sampling_params or self.default_sampling_params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(each)} sampling_params", "sampling_params")
        results: list[RequestOutput] = []
        under_way: dict[str, tuple[RequestOutput, CompletionOutput]] = {}
        try:
            for (text, ids), p in zip(prompts, each, strict=True):
                ids = p.cut_prompt(ids, self.info.max_model_len)
                seed = self._seeds.getrandbits(DRAWN_SEED_BITS) if p.seed is None else p.seed
                result = RequestOutput(f"request-{next(self._ids)}", text, ids, seed, [])
                results.append(result)
                for new in _choices(result, p, self._speculation(p) if speculation else RequestSpeculation(0)):
                    self.engine.add_request(new)
                    answer = CompletionOutput(new.choice, logprobs=[] if new.params.wants_logprobs else None)
                    result.outputs.append(answer)
                    under_way[new.request_id] = result, answer
            while self.engine.has_work:
                for output in self.engine.step().outputs:
                    _extend(*under_way[output.request_id], output)
        except BaseException:
            self.engine.abort_requests(under_way)
            raise
        for result, p in zip(results, each, strict=True):
            _keep_best(result, p)
        return results


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and hasattr(prompts[0], "__index__"))
    return cast(list[Prompt], [prompts] if one else list(prompts))


def _choices(result: RequestOutput, params: SamplingParams, drafts: RequestSpeculation) -> list[NewRequest]:
    """One request of the engine for each of the n answers to a prompt."""
    return [
        NewRequest(
            f"{result.request_id}-{choice}",
            result.prompt_token_ids,
            params.for_engine(),
            result.seed,
            choice=choice,
            max_draft_tokens=drafts.max_draft_tokens,
            draft_methods=drafts.draft_methods,
        )
        for choice in range(params.num_answers)
    ]


def _keep_best(result: RequestOutput, params: SamplingParams) -> None:
    """Of the answers that `best_of` made, the n that are given."""
    if params.num_answers > params.n:
        result.outputs.sort(key=lambda answer: -(answer.cumulative_logprob or 0.0))
        del result.outputs[params.n :]
        for place, answer in enumerate(result.outputs):
            answer.index = place
            if not params.wants_logprobs:
                answer.logprobs = None


def _extend(result: RequestOutput, answer: CompletionOutput, new: EngineOutput) -> None:
    answer.text += new.text
    answer.token_ids += new.token_ids
    answer.drafted += new.drafted
    if answer.logprobs is not None:
        answer.logprobs += new.logprobs or []
    if answer.index == 0:
        result.num_cached_tokens = new.num_cached_tokens
        if new.prompt_logprobs is not None:
            result.prompt_logprobs = [None, *new.prompt_logprobs]
    answer.finish_reason, answer.stop_reason, answer.metrics = new.finish_reason, new.stop_reason, new.metrics
    answer.error = new.error
