"""Beam search over HTTP: rounds of plain requests in place of one that goes on, and the same shape of answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from forerun.beam import Beam, BeamSearch, BeamSearchParams
from forerun.engine.client import EngineClient
from forerun.engine.messages import NewRequest, RequestOutput
from forerun.errors import RequestError
from forerun.request import SamplingParams
from forerun.server.answers import Answer
from forerun.server.fields import shorten
from forerun.server.models import GenerationBody
from forerun.server.prompts import Tokenizer
from forerun.spec.verifier import TokenLogprobs

# Fields of `SamplingParams` that go with it. Nothing is drawn, so a seed changes nothing.
GO_WITH_IT = frozenset(
    {"n", "max_tokens", "ignore_eos", "seed", "skip_special_tokens", "spaces_between_special_tokens"}
)
GO_WITH_IT |= {"truncate_prompt_tokens", "truncation_side", "speculative_config"}


def beam_params(body: GenerationBody, params: SamplingParams, max_model_len: int) -> BeamSearchParams | None:
    """What the body asks of beam search; None where it does not ask for it.

    Raises:
        RequestError: a field that goes with sampling only, or one that goes with beam search only.
    """
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, name) != neutral:
                raise RequestError(f"{name}={shorten(getattr(body, name))} needs use_beam_search=true", name)
        return None
    plain = SamplingParams()
    for name in sorted(body.model_fields_set | {"logprobs", "extra_args", "structured_outputs"}):
        if name in GO_WITH_IT or not hasattr(plain, name) or (name, body.temperature) == ("temperature", 0.0):
            continue
        if getattr(params, name) != getattr(plain, name):
            raise RequestError(f"{name} does not go with use_beam_search=true: leave it out", name)
    if body.echoes:
        raise RequestError("echo does not go with use_beam_search=true: leave it out", "echo")
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or max_model_len,
        ignore_eos=params.ignore_eos,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping,
    )


async def search(
    client: EngineClient, tokenizer: Tokenizer, answer: Answer, params: BeamSearchParams
) -> dict[str, Any]:
    """Run the searches of all prompts side by side; the answer in one piece.

    Raises: as `EngineClient.generate_many`.
    """
    job, info = answer.job, client.info
    prompts = [choice.request.prompt_token_ids for choice in job.choices[:: params.beam_width]]
    searches = [BeamSearch(prompt, params, info.eos_token_ids, info.max_model_len) for prompt in prompts]
    num_rounds = 0
    while pending := [(place, ids) for place, s in enumerate(searches) for ids in s.pending]:
        name = f"{job.choices[0].request.request_id}-round-{num_rounds}"
        entries = await _next_tokens(client, name, [ids for _, ids in pending], params.one_token())
        for place, s in enumerate(searches):
            if own := [entry for (at, _), entry in zip(pending, entries, strict=True) if at == place]:
                s.extend(own)
        num_rounds += 1
    for place, s in enumerate(searches):
        for index, beam in enumerate(s.best(), place * params.beam_width):
            request = job.choices[index].request
            text = _text(tokenizer, request.prompt_token_ids, beam, job.params.skip_special_tokens)
            answer.take(
                index, RequestOutput(request.request_id, beam.token_ids, text, finish_reason=beam.finish_reason)
            )
    return answer.whole()


async def _next_tokens(
    client: EngineClient, name: str, sequences: Sequence[list[int]], params: SamplingParams
) -> list[TokenLogprobs]:
    requests = [NewRequest(f"{name}-{i}", ids, params, 0, max_draft_tokens=0) for i, ids in enumerate(sequences)]
    entries: dict[int, TokenLogprobs] = {}
    async with aclosing(client.generate_many(requests)) as outputs:
        async for index, output in outputs:
            entries.update((index, entry) for entry in output.logprobs or ())
    return [entries[index] for index in range(len(sequences))]


def _text(tokenizer: Tokenizer, prompt: Sequence[int], beam: Beam, skip_special_tokens: bool) -> str:
    """Of the beam's tokens, where they go on after the prompt."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens) for ids in (prompt, [*prompt, *beam.token_ids]))
    return whole[len(before) :]
