"""The shape of answers: one object, or a stream of chunks. The two kinds differ in their choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from forerun.engine.messages import RequestOutput
from forerun.server.job import Choice, Job, choice_metrics
from forerun.server.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from forerun.server.prompts import Tokenizer
from forerun.server.settings import ServerSettings
from forerun.spec.verifier import TokenLogprobs


class Answer(ABC):
    """Says how one job is answered.

    The figures of a choice, where the server gives them, stand beside the usage when it is the only one, as vLLM has
    it, and in the choice when there are several.
    """

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, job: Job, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.job = job
        self.tokenizer = tokenizer
        self.settings = settings
        self.num_logprobs = len(job.params.logprob_token_ids) or job.params.logprobs
        self._head = {"id": job.id, "object": self.chunk_object, "created": job.created, "model": job.model}

    def whole(self) -> dict[str, Any]:
        """The answer in one piece; every output was given to its choice's `keep`."""
        return self._head | {
            "object": self.object,
            "choices": [self.choice(index, choice) for index, choice in enumerate(self.job.answers)],
            **self._usage(),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before any output."""
        return []

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """The chunk for an output; None where it brings nothing to show (its text is held back)."""
        choice = self.job.choices[index]
        choice.count(output)
        body = self.job.body
        shows_tokens = output.token_ids and (body.return_token_ids or self.num_logprobs is not None)
        shows_text = output.text or self._echo_is_due(choice)
        if not (shows_text or output.finish_reason or shows_tokens or body.continuous_usage):
            return None
        delta = self.delta(index, choice, output)
        if body.return_token_ids:
            delta["token_ids"] = output.token_ids
        if output.finish_reason is not None:
            delta["stop_reason"] = output.stop_reason
            delta["seed"] = choice.request.seed
            delta |= self._own_metrics(choice)
        return self.frame([delta])

    def closing(self) -> list[dict[str, Any]]:
        """Chunks that come after all outputs."""
        if not self.job.body.include_usage:
            return []
        return [self._head | {"choices": [], **self._usage()}]

    def frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"choices": choices}
        if self.job.body.include_usage:
            chunk["usage"] = self.job.usage() if self.job.body.continuous_usage else None
        return chunk

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": self.job.usage()}
        return usage | (self._metrics(self.job.choices[0]) if len(self.job.choices) == 1 else {})

    def _own_metrics(self, choice: Choice) -> dict[str, Any]:
        return self._metrics(choice) if len(self.job.choices) > 1 else {}

    def _echo_is_due(self, choice: Choice) -> bool:
        return self.job.body.echoes and not choice.echoed

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Those of the prompt's tokens, where the body asks for them by this name."""
        if self.job.body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.tokenizer, choice.prompt_logprobs)}

    def _metrics(self, choice: Choice) -> dict[str, Any]:
        metrics = choice_metrics(choice, self.settings)
        return {} if metrics is None else {"metrics": metrics}

    def _choice_tail(self, choice: Choice) -> dict[str, Any]:
        tail: dict[str, Any] = {
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "seed": choice.request.seed,
            **self._own_metrics(choice),
        }
        if self.job.body.return_token_ids:
            tail["token_ids"] = choice.token_ids
        return tail

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, index: int, choice: Choice, output: RequestOutput) -> dict[str, Any]: ...


class CompletionAnswer(Answer):
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text, logprobs = self._shown(choice, "".join(choice.text), choice.logprobs)
        answer = {"index": index, "text": text, "logprobs": logprobs} | self._choice_tail(choice)
        answer |= self._prompt_logprobs(choice)
        if self.job.body.return_token_ids:
            answer["prompt_token_ids"] = choice.request.prompt_token_ids
        return answer

    def opening(self) -> list[dict[str, Any]]:
        if not self.job.body.return_token_ids:
            return []
        return [
            self.frame([self._empty(index) | {"prompt_token_ids": c.request.prompt_token_ids, "token_ids": []}])
            for index, c in enumerate(self.job.choices)
        ]

    def _empty(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def delta(self, index: int, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        choice.prompt_logprobs += output.prompt_logprobs or []
        text, logprobs = self._shown(choice, output.text, output.logprobs or ())
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _shown(self, choice: Choice, text: str, entries: Sequence[TokenLogprobs]) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of a choice, or of the next part of it; an echo of the prompt goes before all."""
        prompt = None
        if self._echo_is_due(choice):
            choice.echoed, prompt = True, choice.request.prompt_token_ids
            text = self.tokenizer.decode(prompt, self.job.params.skip_special_tokens) + text
            entries = [*choice.prompt_logprobs, *entries]
        if self.num_logprobs is None or not (entries or prompt or not self.job.body.stream):
            return text, None
        return text, completion_logprobs(self.tokenizer, choice, entries, None if prompt is None else prompt[0])


class ChatAnswer(Answer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        answer = super().whole()
        if self.job.body.return_token_ids:
            answer["prompt_token_ids"] = self.job.choices[0].request.prompt_token_ids
        return answer | self._prompt_logprobs(self.job.choices[0])

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self.num_logprobs is not None:
            logprobs = chat_logprobs(self.tokenizer, choice.logprobs, self.num_logprobs)
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs} | self._choice_tail(choice)

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self.frame([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(len(self.job.choices))
        ]
        if self.job.body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self.job.choices[0].request.prompt_token_ids
        return chunks

    def delta(self, index: int, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        logprobs = None
        if output.logprobs and self.num_logprobs is not None:
            logprobs = chat_logprobs(self.tokenizer, output.logprobs, self.num_logprobs)
        delta = {"content": output.text} if output.text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": output.finish_reason}
