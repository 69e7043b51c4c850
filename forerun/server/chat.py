"""Chat: from its body to a job, and from outputs to messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from forerun.engine.messages import RequestOutput
from forerun.parsers.pieces import CallBroken, CallStart, Content, Piece, Reasoning
from forerun.request import FinishReason
from forerun.server.answers import ChoicesAnswer
from forerun.server.conversation import chat_prompt, effort_kwargs
from forerun.server.job import Choice, Job
from forerun.server.logprobs import chat_logprobs
from forerun.server.models import ChatBody, shown_tools
from forerun.server.parsing import MessageState, ToolUse, judge_tools
from forerun.server.state import ServerState


def tools_of(state: ServerState, body: ChatBody) -> ToolUse:
    """
    Raises:
        RequestError: tools that cannot be served, or a choice that names none of them.
    """
    return judge_tools(state.settings, shown_tools(body.tools), body.tool_choice, body.parallel_tool_calls)


async def prompt_of(state: ServerState, body: ChatBody, tools: ToolUse) -> list[int]:
    """Token ids of the conversation.

    Raises:
        RequestError: it cannot be rendered.
    """
    return await chat_prompt(
        state.tokenizer,
        body.messages,
        limits=state.limits_for(body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=effort_kwargs(body.reasoning_effort, state.tokenizer) | body.chat_template_kwargs,
        tools=tools.shown,
    )


def message_states(state: ServerState, job: Job, tools: ToolUse) -> list[MessageState]:
    """One a choice."""
    request = job.choices[0].request
    skips = request.params.skip_special_tokens
    return [state.parsing.message(request.prompt_token_ids, tools, skips) for _ in job.choices]


def fold(pieces: Iterable[Piece]) -> tuple[str, str]:
    """Reasoning and content of a whole message; a call that broke off is content."""
    reasoning, content = [], []
    for piece in pieces:
        if isinstance(piece, Reasoning):
            reasoning.append(piece.text)
        elif isinstance(piece, Content | CallBroken):
            content.append(piece.text)
    return "".join(reasoning), "".join(content)


class ChatAnswer(ChoicesAnswer):
    """
    Args:
        messages: one a choice.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, state: ServerState, job: Job, messages: Sequence[MessageState], body: ChatBody) -> None:
        super().__init__(job, state.tokenizer, state.settings)
        self.messages = messages
        self._counts_reasoning = state.parsing.counts_reasoning
        self._shows_reasoning = body.include_reasoning
        self._pieces: list[list[Piece]] = [[] for _ in messages]

    def take(self, index: int, output: RequestOutput) -> None:
        super().take(index, output)
        self._pieces[index] += self.messages[index].push(output)

    def whole(self) -> dict[str, Any]:
        answer = super().whole()
        if self.job.body.return_token_ids:
            answer["prompt_token_ids"] = self.job.choices[0].request.prompt_token_ids
        return answer | self._prompt_logprobs(self.job.choices[0])

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self._counts_reasoning:
            number = sum(message.num_reasoning_tokens for message in self.messages)
            usage["completion_tokens_details"] = {"reasoning_tokens": number}
        return usage

    def finish_reason(self, index: int, choice: Choice) -> str | None:
        calls = choice.finish_reason is FinishReason.STOP and self.messages[index].calls
        return "tool_calls" if calls else choice.finish_reason

    def content(self, index: int, choice: Choice) -> dict[str, Any]:
        reasoning, content = fold(self._pieces[index])
        calls = self.messages[index].calls
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if not content and (calls or reasoning):
            message["content"] = None
        if reasoning and self._shows_reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
        return {"message": message}

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        chunks = [self.frame([self.empty(index) | {"delta": delta}]) for index in range(len(self.job.choices))]
        if self.job.body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self.job.choices[0].request.prompt_token_ids
        return chunks

    def delta(self, index: int, choice: Choice, output: RequestOutput) -> dict[str, Any] | None:
        delta = self._delta(index, self.messages[index].push(output))
        return self.empty(index) | {"delta": delta} if delta else None

    def _delta(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        state = self.messages[index]
        place = len(state.begun) - sum(isinstance(piece, CallStart) for piece in pieces) - 1
        for piece in pieces:
            if isinstance(piece, Reasoning):
                if self._shows_reasoning:
                    for name in ("reasoning", "reasoning_content"):
                        delta[name] = delta.get(name, "") + piece.text
            elif isinstance(piece, Content | CallBroken):
                text = piece.text if isinstance(piece, Content) else piece.rest
                delta["content"] = delta.get("content", "") + text
            elif isinstance(piece, CallStart):
                place += 1
                calls[place] = {"index": place, **state.begun[place].as_dict()}
                calls[place]["function"]["arguments"] = ""
            else:
                call = calls.setdefault(place, {"index": place, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def empty(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}

    def logprobs(self, choice: Choice, entries: Sequence[Any]) -> dict[str, Any]:
        assert self.num_logprobs is not None
        return chat_logprobs(self.names, entries, self.num_logprobs)
