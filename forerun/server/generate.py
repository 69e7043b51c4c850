"""The routes that generate: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from forerun.errors import RequestError
from forerun.request import SamplingParams
from forerun.server.answers import Answer, ChatAnswer, CompletionAnswer
from forerun.server.beams import beam_params, search
from forerun.server.body import parse_body, read_body
from forerun.server.errors import CLIENT_GONE, error_response, json_response
from forerun.server.job import Job
from forerun.server.models import ChatBody, CompletionBody, GenerationBody
from forerun.server.openapi import describe_body
from forerun.server.prompts import Limits, chat_prompt, check_prompt, completion_prompts, offload
from forerun.server.state import ServerState, state_of
from forerun.server.streaming import ClientGoneError, EventStream, Outputs, unless_gone
from forerun.spec.per_request import RequestSpeculation

router = APIRouter()


@router.post("/v1/completions", openapi_extra=describe_body(CompletionBody))
async def completions(request: Request) -> Response:
    state = state_of(request)
    body = CompletionBody.read(await read_json(request))
    make_job = _job_maker(request, state, "cmpl", body, "prompt")
    prompts = await completion_prompts(state.tokenizer, body.prompt, body.add_special_tokens, _limits(state, body))
    return await _respond(request, state, CompletionAnswer(make_job(prompts), state.tokenizer, state.settings))


@router.post("/v1/chat/completions", openapi_extra=describe_body(ChatBody))
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    body = ChatBody.read(await read_json(request))
    make_job = _job_maker(request, state, "chatcmpl", body, "messages")
    prompt = await chat_prompt(
        state.tokenizer,
        body.messages,
        limits=_limits(state, body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    return await _respond(request, state, ChatAnswer(make_job([prompt]), state.tokenizer, state.settings))


async def read_json(request: Request) -> dict[str, Any]:
    body = await read_body(request, state_of(request).settings.max_body_bytes)
    return await offload(len(body), lambda: parse_body(body))


def _job_maker(
    request: Request, state: ServerState, prefix: str, body: GenerationBody, field: str
) -> Callable[[Sequence[list[int]]], Job]:
    """From prompts to the job; all that can be wrong whatever the prompts are is judged before they are tokenised.

    Args:
        field: that the prompts come from.
    """
    model, params, drafts = state.served_name(body.model), _checked_params(state, body), _speculation(state, body)
    name = _given_id(request, body)

    def make(prompts: Sequence[list[int]]) -> Job:
        prompts = [params.cut_prompt(prompt, state.client.info.max_model_len) for prompt in prompts]
        for prompt in prompts:
            check_prompt(prompt, field, state.vocab_size, state.client.info.max_model_len)
        several = "best_of" if params.best_of is not None else "n"
        state.client.check_room(len(prompts) * params.num_answers, "prompt" if params.num_answers == 1 else several)
        return state.jobs.make(prefix, model, body, params, prompts, name, drafts)

    return make


def _checked_params(state: ServerState, body: GenerationBody) -> SamplingParams:
    params = body.sampling(state.client.info.sampling_defaults)
    params.check_vocabulary(state.vocab_size)
    return params


def _limits(state: ServerState, body: GenerationBody) -> Limits:
    """A prompt that is to be cut may be as long as all prompts together."""
    limits = state.limits
    return limits if body.truncate_prompt_tokens is None else replace(limits, max_model_len=limits.max_text_bytes)


def _speculation(state: ServerState, body: GenerationBody) -> RequestSpeculation:
    info = state.client.info
    return body.speculation(info.spec_methods, info.num_spec_tokens)


def _given_id(request: Request, body: GenerationBody) -> str:
    name = body.request_id or request.headers.get("x-request-id", "")
    if len(name) > 256:
        raise RequestError("the header X-Request-Id has more than 256 characters", "request_id")
    return name


async def _respond(request: Request, state: ServerState, answer: Answer) -> Response:
    job = answer.job
    beams = beam_params(job.body, job.params, state.client.info.max_model_len)
    try:
        if beams is not None:
            return json_response(await unless_gone(request.receive, search(state.client, answer, beams)))
        outputs = state.client.generate_many(job.requests)
        if job.body.stream:
            first = await unless_gone(request.receive, anext(outputs))
            return EventStream(answer, first, outputs)
        return json_response(await unless_gone(request.receive, _collect(answer, outputs)))
    except ClientGoneError:
        return error_response(CLIENT_GONE, "the client closed the connection")


async def _collect(answer: Answer, outputs: Outputs) -> dict[str, Any]:
    async with aclosing(outputs):
        async for index, output in outputs:
            answer.job.choices[index].keep(output)
    return answer.whole()
