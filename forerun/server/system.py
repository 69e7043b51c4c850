"""The routes that do not generate: what is served, how it fares, and tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from forerun.errors import RequestError
from forerun.server.conversation import chat_prompt
from forerun.server.errors import error_response, json_response
from forerun.server.generate import read_json
from forerun.server.models import DetokenizeBody, TokenizeBody, shown_tools
from forerun.server.openapi import describe_body
from forerun.server.prompts import check_token_ids, completion_prompts, offload
from forerun.server.state import ServerState, state_of
from forerun.spec.rules import available_rules
from forerun.spec.stats import SpecTotals
from forerun.version import package_version

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are taken; else 503, with the reason."""
    trouble = state_of(request).client.trouble
    return Response() if trouble is None else error_response(503, trouble)


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    return await health(request)


@router.get("/version")
async def show_version() -> Response:
    return json_response({"version": package_version()})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    state = state_of(request)
    return json_response({"object": "list", "data": [_card(state, name) for name in state.settings.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    state = state_of(request)
    return json_response(_card(state, state.served_name(name)))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    collected = state_of(request).metrics
    text = b"" if collected is None else generate_latest(collected.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/speculation")
async def speculation(request: Request) -> Response:
    """The configuration as it was resolved, and what speculation did since the start."""
    client = state_of(request).client
    stats = client.stats()
    return json_response(
        {
            "speculative_config": client.info.speculative_config,
            "methods": client.info.spec_methods,
            "num_speculative_tokens": client.info.num_spec_tokens,
            "rejection_sample_method": client.info.rejection_sample_method,
            "lossless": client.info.lossless,
            "request_rejection_sample_methods": available_rules(client.info.rejection_sample_method),
            "totals": _totals(stats.spec),
            "by_proposer": {name: _totals(totals) for name, totals in stats.spec_by_proposer.items()},
            "num_steps": stats.num_steps,
            "num_steps_ahead": stats.num_steps_ahead,
            "step_time_s": stats.step_time_s,
            "draft_time_s": stats.draft_time_s,
            "draft_time_s_by_proposer": stats.draft_time_by_proposer,
            "forward_time_s": stats.forward_time_s,
            "verify_time_s": stats.verify_time_s,
            "not_drafted": stats.not_drafted,
            "proposer_bytes": stats.proposer_bytes,
        }
    )


@router.post("/tokenize", openapi_extra=describe_body(TokenizeBody))
async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = TokenizeBody.read(await read_json(request))
    state.served_name(body.model)
    tokens = await _tokens(state, body)
    answer = {"count": len(tokens), "max_model_len": state.client.info.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = await offload(len(tokens), lambda: list(map(state.tokenizer.token_text, tokens)))
    return json_response(answer)


@router.post("/detokenize", openapi_extra=describe_body(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = DetokenizeBody.read(await read_json(request))
    state.served_name(body.model)
    check_token_ids(body.tokens, "tokens", state.vocab_size)
    if len(body.tokens) > (most := state.limits.max_text_bytes):
        raise RequestError(f"tokens has {len(body.tokens)} token ids, at most {most} are accepted", "tokens")
    text = await offload(len(body.tokens), lambda: state.tokenizer.decode(body.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})


async def _tokens(state: ServerState, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.messages is not None:
        return await chat_prompt(
            state.tokenizer,
            body.messages,
            limits=state.limits,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            tools=shown_tools(body.tools) or None,
        )
    text, special = body.prompt or "", body.add_special_tokens is not False
    (tokens,) = await completion_prompts(state.tokenizer, text, special, state.limits)
    return tokens


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "forerun",
        "root": state.settings.model_name,
        "parent": None,
        "max_model_len": state.client.info.max_model_len,
        "permission": [],
    }


def _totals(totals: SpecTotals) -> dict[str, Any]:
    drafts, drafted, accepted = totals.num_drafts, totals.num_draft_tokens, totals.num_accepted_tokens
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": totals.num_accepted_tokens_per_pos,
        "num_loosely_accepted_tokens": totals.num_loosely_accepted_tokens,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
    }
