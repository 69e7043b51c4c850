"""The routes that generate: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from forerun.errors import RequestError
from forerun.request import SamplingParams
from forerun.server.answers import Answer, CompletionAnswer
from forerun.server.beams import beam_params, search
from forerun.server.body import parse_body, read_body
from forerun.server.chat import ChatAnswer, message_states, prompt_of, tools_of
from forerun.server.errors import CLIENT_GONE, error_response, json_response
from forerun.server.job import Job
from forerun.server.models import ChatBody, CompletionBody, GenerationBody
from forerun.server.openapi import describe_body
from forerun.server.parsing import MessageState
from forerun.server.prompts import Tokenizer, check_prompt, completion_prompts, offload, prompt_texts
from forerun.server.state import ServerState, state_of
from forerun.server.streaming import ClientGoneError, EventStream, Outputs, paced, unless_gone
from forerun.server.structured import check_form
from forerun.spec.per_request import RequestSpeculation

router = APIRouter()


@router.post("/v1/completions", openapi_extra=describe_body(CompletionBody))
async def completions(request: Request) -> Response:
    state = state_of(request)
    body = CompletionBody.read(await read_json(request))
    make_job = await job_maker(request, state, "cmpl", body, "prompt")
    limits = state.limits_for(body)
    job = make_job(await completion_prompts(state.tokenizer, body.prompt, body.add_special_tokens, limits))
    echoes = prompt_echoes(state.tokenizer, body, job) if body.echo else ()
    return await respond(request, state, CompletionAnswer(job, state.tokenizer, state.settings, echoes))


@router.post("/v1/chat/completions", openapi_extra=describe_body(ChatBody))
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    body = ChatBody.read(await read_json(request))
    job, messages = await chat_job(request, state, body, "chatcmpl")
    return await respond(request, state, ChatAnswer(state, job, messages, body))


async def chat_job(request: Request, state: ServerState, body: ChatBody, prefix: str) -> tuple[Job, list[MessageState]]:
    """The job of a conversation, and the messages that its choices become."""
    tools = tools_of(state, body)
    skips = state.parsing.skips_special_tokens(tools)
    make_job = await job_maker(request, state, prefix, body, "messages", skips, tools.form)
    job = make_job([await prompt_of(state, body, tools)])
    return job, message_states(state, job, tools)


async def read_json(request: Request) -> dict[str, Any]:
    body = await read_body(request, state_of(request).settings.max_body_bytes)
    return await offload(len(body), lambda: parse_body(body))


def prompt_echoes(tokenizer: Tokenizer, body: CompletionBody, job: Job) -> list[str]:
    """The text of each prompt: as it was given, or that of its tokens where it may have been cut."""
    prompts = [choice.request.prompt_token_ids for choice in job.choices if choice.request.choice == 0]
    given = body.prompt if body.truncate_prompt_tokens is None else prompts
    return prompt_texts(tokenizer, given, prompts)


async def job_maker(
    request: Request,
    state: ServerState,
    prefix: str,
    body: GenerationBody,
    field: str,
    may_skip_special_tokens: bool = True,
    tool_form: dict[str, Any] | None = None,
) -> Callable[[Sequence[list[int]]], Job]:
    """From prompts to the job; all that can be wrong whatever the prompts are is judged before they are tokenised.

    Args:
        field: that the prompts come from.
        tool_form: what the choice of tools promises of the text's form, as `SamplingParams.structured_outputs`.
    """
    model, params, drafts = state.served_name(body.model), _checked_params(state, body), _speculation(state, body)
    params = replace(params, skip_special_tokens=params.skip_special_tokens and may_skip_special_tokens)
    name, salt = _given_id(request, body), cache_salt(request, state, body)
    if tool_form is not None:
        if params.structured_outputs is not None:
            raise RequestError("a form for the answer excludes tools that must be called or are strict", "tool_choice")
        params = replace(params, structured_outputs=tool_form)
    await check_form(state.grammars, body, params)

    def make(prompts: Sequence[list[int]]) -> Job:
        prompts = [params.cut_prompt(prompt, state.client.info.max_model_len) for prompt in prompts]
        for prompt in prompts:
            check_prompt(prompt, field, state.vocab_size, state.client.info.max_model_len)
        several = "best_of" if params.best_of is not None else "n"
        state.client.check_room(len(prompts) * params.num_answers, "prompt" if params.num_answers == 1 else several)
        return state.jobs.make(prefix, model, body, params, prompts, name, drafts, salt)

    return make


def _checked_params(state: ServerState, body: GenerationBody) -> SamplingParams:
    params = body.sampling(state.client.info.sampling_defaults)
    params.check_vocabulary(state.vocab_size)
    return params


def _speculation(state: ServerState, body: GenerationBody) -> RequestSpeculation:
    info = state.client.info
    return body.speculation(info.spec_methods, info.num_spec_tokens, info.rejection_sample_method)


def _given_id(request: Request, body: GenerationBody) -> str:
    name = body.request_id or request.headers.get("x-request-id", "")
    if len(name) > 256:
        raise RequestError("the header X-Request-Id has more than 256 characters", "request_id")
    return name


def cache_salt(request: Request, state: ServerState, body: GenerationBody) -> str:
    """What caches are kept apart by: the user's own salt, and behind it the API key where the server is told so."""
    salt = body.cache_salt or ""
    return f"{request.state.api_key_digest}:{salt}" if state.settings.salt_by_api_key else salt


async def respond(request: Request, state: ServerState, answer: Answer) -> Response:
    job = answer.job
    beams = beam_params(job.body, job.params, state.client.info.max_model_len)
    try:
        if beams is not None:
            return json_response(
                await unless_gone(request.receive, search(state.client, state.tokenizer, answer, beams))
            )
        outputs = state.client.generate_many(job.requests)
        if job.body.stream:
            interval = max(job.body.stream_interval, state.settings.stream_interval)
            outputs = paced(outputs, interval) if interval > 1 else outputs
            first = await unless_gone(request.receive, anext(outputs))
            return EventStream(answer, first, outputs)
        return json_response(await unless_gone(request.receive, _collect(answer, outputs)))
    except ClientGoneError:
        return error_response(CLIENT_GONE, "the client closed the connection")


async def _collect(answer: Answer, outputs: Outputs) -> dict[str, Any]:
    async with aclosing(outputs):
        async for index, output in outputs:
            answer.take(index, output)
    return answer.whole()
