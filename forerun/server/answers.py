"""The shape of answers: one object, or a stream of chunks. The kinds differ in their choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from forerun.engine.messages import RequestOutput
from forerun.server.job import Choice, Job, choice_metrics, is_lossy
from forerun.server.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from forerun.server.prompts import Tokenizer
from forerun.server.settings import ServerSettings
from forerun.spec.verifier import TokenLogprobs


class Answer(ABC):
    """Says how one job is answered: in one piece (`take` each output, then `whole`), or as a stream of events."""

    done: ClassVar[bytes] = b"data: [DONE]\n\n"  # what a stream ends with

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def take(self, index: int, output: RequestOutput) -> None:
        """Keep an output of an answer in one piece."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one piece, once every output was taken."""

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Events that come before any output."""

    @abstractmethod
    def events(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The events for an output; none where it brings nothing to show (its text is held back)."""

    @abstractmethod
    def closing(self) -> list[dict[str, Any]]:
        """Events that come after all outputs."""

    def encode(self, event: dict[str, Any]) -> bytes:
        """An event as it is sent."""
        return b"data: " + msgspec.json.encode(event) + b"\n\n"


class ChoicesAnswer(Answer):
    """An answer of several choices.

    The figures of a choice, where the server gives them, stand beside the usage when it is the only one, as vLLM has
    it, and in the choice when there are several.
    """

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, job: Job, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        super().__init__(job)
        self.tokenizer = tokenizer
        self.settings = settings
        self.names = TokenNames(
            tokenizer, by_id=job.body.return_tokens_as_token_ids or settings.return_tokens_as_token_ids
        )
        options = job.body.stream_options
        self.includes_usage = settings.enable_force_include_usage or (options is not None and options.include_usage)
        self.continuous_usage = self.includes_usage and options is not None and options.continuous_usage_stats
        self.num_logprobs = len(job.params.logprob_token_ids) or job.params.logprobs
        self._head = {"id": job.id, "object": self.chunk_object, "created": job.created, "model": job.model}

    def take(self, index: int, output: RequestOutput) -> None:
        self.job.choices[index].keep(output)

    def whole(self) -> dict[str, Any]:
        return self._head | {
            "object": self.object,
            "choices": [
                self.choice(place, self.job.choices[place]) | {"index": index}
                for index, place in enumerate(self.job.answers)
            ],
            **self._usage(),
        }

    def opening(self) -> list[dict[str, Any]]:
        return []

    def events(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choice = self.job.choices[index]
        choice.count(output)
        choice.prompt_logprobs += output.prompt_logprobs or []
        body = self.job.body
        shows_tokens = output.token_ids and (body.return_token_ids or self.num_logprobs is not None)
        delta = self.delta(index, choice, output)
        if delta is None and not (output.finish_reason or shows_tokens or self.continuous_usage):
            return []
        shown = (delta or self.empty(index)) | {"finish_reason": self.finish_reason(index, choice)}
        if output.logprobs and self.num_logprobs is not None:
            shown["logprobs"] = self.logprobs(choice, output.logprobs)
        if body.return_token_ids:
            shown["token_ids"] = output.token_ids
        if output.finish_reason is not None:
            shown["stop_reason"] = output.stop_reason
            shown["seed"] = choice.request.seed
            shown |= self._own_metrics(choice)
        chunk = self.frame([shown])
        if is_lossy(choice.metrics) and not self.includes_usage:  # no chunk with the usage comes to say so
            chunk |= self._only_metrics()
        return [chunk]

    def closing(self) -> list[dict[str, Any]]:
        if not self.includes_usage:
            return []
        return [self._head | {"choices": [], **self._usage()}]

    def frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"choices": choices}
        if self.includes_usage:
            chunk["usage"] = self.usage() if self.continuous_usage else None
        return chunk

    def usage(self) -> dict[str, Any]:
        return self.job.usage(details=self.settings.enable_prompt_tokens_details)

    def finish_reason(self, index: int, choice: Choice) -> str | None:
        """Why a choice has ended; None while it goes on."""
        return choice.finish_reason

    def _usage(self) -> dict[str, Any]:
        return {"usage": self.usage()} | self._only_metrics()

    def _only_metrics(self) -> dict[str, Any]:
        return self._metrics(self.job.choices[0]) if len(self.job.choices) == 1 else {}

    def _own_metrics(self, choice: Choice) -> dict[str, Any]:
        return self._metrics(choice) if len(self.job.choices) > 1 else {}

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Those of the prompt's tokens, where the body asks for them by this name."""
        if self.job.body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.tokenizer, choice.prompt_logprobs)}

    def _metrics(self, choice: Choice) -> dict[str, Any]:
        metrics = choice_metrics(choice, self.settings)
        return {} if metrics is None else {"metrics": metrics}

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """A choice of an answer in one piece."""
        logprobs = None if self.num_logprobs is None else self.logprobs(choice, choice.logprobs)
        answer = {"index": index, **self.content(index, choice), "logprobs": logprobs}
        answer |= {
            "finish_reason": self.finish_reason(index, choice),
            "stop_reason": choice.stop_reason,
            "seed": choice.request.seed,
            **self._own_metrics(choice),
        }
        if self.job.body.return_token_ids:
            answer["token_ids"] = choice.token_ids
        return answer

    @abstractmethod
    def content(self, index: int, choice: Choice) -> dict[str, Any]:
        """What a choice says, in one piece."""

    @abstractmethod
    def delta(self, index: int, choice: Choice, output: RequestOutput) -> dict[str, Any] | None:
        """What an output adds to a choice, as a chunk's choice; None where that is nothing."""

    @abstractmethod
    def empty(self, index: int) -> dict[str, Any]:
        """A chunk's choice that says nothing."""

    @abstractmethod
    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]: ...


class CompletionAnswer(ChoicesAnswer):
    """
    Args:
        echoes: of each prompt, the text that its answers begin with; () where they begin after it.
    """

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, job: Job, tokenizer: Tokenizer, settings: ServerSettings, echoes: Sequence[str] = ()) -> None:
        super().__init__(job, tokenizer, settings)
        self._echoes = echoes
        self._to_echo = set(range(len(job.choices))) if echoes else set()

    def _echo(self, place: int) -> str:
        return self._echoes[place // self.job.params.num_answers] if self._echoes else ""

    def content(self, index: int, choice: Choice) -> dict[str, Any]:
        content: dict[str, Any] = {"text": self._echo(index) + "".join(choice.text)}
        content |= self._prompt_logprobs(choice)
        if self.job.body.return_token_ids:
            content["prompt_token_ids"] = choice.request.prompt_token_ids
        return content

    def opening(self) -> list[dict[str, Any]]:
        if not self.job.body.return_token_ids:
            return []
        return [
            self.frame([self.empty(index) | {"prompt_token_ids": c.request.prompt_token_ids, "token_ids": []}])
            for index, c in enumerate(self.job.choices)
        ]

    def delta(self, index: int, choice: Choice, output: RequestOutput) -> dict[str, Any] | None:
        text = output.text
        if index in self._to_echo:
            self._to_echo.remove(index)
            text = self._echo(index) + text
        return self.empty(index) | {"text": text} if text else None

    def empty(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Those of an echoed prompt come before the first of the answer's."""
        opening = None
        if self._echoes and not choice.echoed:
            choice.echoed, opening = True, choice.request.prompt_token_ids[0]
            entries = [*choice.prompt_logprobs, *entries]
        return completion_logprobs(self.names, choice, entries, opening)
