"""`forerun generate`: complete one prompt in this process. The text streams to stdout, all else goes to stderr."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from forerun.cli.serve import parse_bytes
from forerun.cli.speculation import (
    BatchInvariantOption,
    LegacyModelOption,
    LegacyTokensOption,
    SpecMethodOption,
    SpecModelOption,
    SpecNotesOption,
    SpecTokensOption,
    SpeculativeConfigOption,
    roles_from_options,
)
from forerun.errors import RequestError
from forerun.request import DRAWN_SEED_BITS, SamplingParams

if TYPE_CHECKING:  # torch comes with them, and the options are judged first
    from forerun.engine.messages import RequestMetrics, RequestOutput
    from forerun.llm import LLM

REQUEST_ID = "generate"


def generate(
    model: Annotated[str, typer.Argument(help="A directory in Hugging Face layout, a .gguf file or a built-in name.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to go on from; - reads it from stdin.")],
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: a system message before it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most likely token each time; if not given, the model's or 1.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens above this share of the likeliest's.")] = None,
    presence_penalty: Annotated[float, typer.Option(help="Against tokens that the output holds.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, times how often it holds them.")] = 0.0,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Against tokens of prompt and output; 1 changes nothing.")
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Never write this; may be repeated.")] = None,
    min_tokens: Annotated[int, typer.Option(help="So many tokens come before any end.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Fixes the text; one is drawn and shown if not given.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities of the n likeliest.")] = None,
    structured_outputs: Annotated[
        str | None, typer.Option(metavar="JSON", help='The form of the text, {"json": SCHEMA} say.')
    ] = None,
    speculative_config: SpeculativeConfigOption = None,
    spec_method: SpecMethodOption = None,
    spec_model: SpecModelOption = None,
    spec_tokens: SpecTokensOption = None,
    speculative_model: LegacyModelOption = None,
    num_speculative_tokens: LegacyTokensOption = None,
    spec_note: SpecNotesOption = None,
    batch_invariant: BatchInvariantOption = False,
    tokenizer: Annotated[str | None, typer.Option(help="Where the tokenizer comes from, if not the model.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, tokens.")] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory for KV blocks; if not given, a quarter of what is free.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32; on a GPU also bfloat16 and float16.")] = "auto",
    reasoning_parser: Annotated[
        str | None, typer.Option(help="Tags around reasoning: qwen3, deepseek_r1, or tags:START,END.")
    ] = None,
    num_threads: Annotated[int | None, typer.Option(help="Threads; if not given, PyTorch's choice.")] = None,
) -> None:
    """Complete a prompt, here and now.

    Drafting (--speculative-config, see `forerun config`) changes the speed and not the text.
    """
    target, spec, notes = roles_from_options(
        model,
        speculative_config=speculative_config,
        spec_method=spec_method,
        spec_model=spec_model,
        spec_tokens=spec_tokens,
        speculative_model=speculative_model,
        num_speculative_tokens=num_speculative_tokens,
        notes=spec_note,
    )
    for note in notes:
        say(f"warning: {note}")
    chances = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    given = {name: value for name, value in chances.items() if value is not None}  # the others may be the model's own
    params = SamplingParams(
        **cast(dict[str, Any], given),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        bad_words=tuple(bad_word or ()),
        min_tokens=min_tokens,
        seed=random.SystemRandom().getrandbits(DRAWN_SEED_BITS) if seed is None else seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        structured_outputs=_read_form(structured_outputs),
    )
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs is printed with --json only: add --json", "logprobs")
    if system is not None and not chat:
        raise RequestError("--system goes with --chat: add --chat", "system")
    cache_bytes = parse_bytes("--kv-cache-memory", kv_cache_memory)
    text = sys.stdin.read() if prompt == "-" else prompt

    from forerun.llm import LLM

    llm = LLM(
        target,
        speculative_config=spec,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        batch_invariant=batch_invariant,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=cache_bytes,
        num_threads=num_threads,
        reasoning_parser=reasoning_parser,
    )
    params = replace(params, **{k: v for k, v in llm.info.sampling_defaults.items() if k not in given})
    ids = _prompt_ids(llm, text, chat, system)
    if as_json:
        outputs = list(stream(llm, ids, params))
        typer.echo(json.dumps(_as_object(model, ids, params, outputs), ensure_ascii=False))
    else:
        outputs = []
        for output in stream(llm, ids, params):
            outputs.append(output)
            typer.echo(output.text, nl=False)
        typer.echo()
    if (error := outputs[-1].error) is not None:
        raise RequestError(error)
    say(closing_line(outputs, params))


def stream(llm: LLM, prompt_token_ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
    """What each step brings. The request is aborted where the caller stops early."""
    from forerun.engine.messages import NewRequest

    assert params.seed is not None
    llm.engine.add_request(NewRequest(REQUEST_ID, prompt_token_ids, params, params.seed))
    try:
        while llm.engine.has_work:
            yield from llm.engine.step().outputs
    finally:
        llm.engine.abort_requests([REQUEST_ID])


def say(line: str) -> None:
    typer.echo(line, err=True)


def closing_line(outputs: list[RequestOutput], params: SamplingParams) -> str:
    """Tokens, times, and what drafting brought."""
    last, num_tokens = outputs[-1], sum(len(output.token_ids) for output in outputs)
    parts = [f"{num_tokens} token{'s'[: num_tokens != 1]}, {last.finish_reason}"]
    if (metrics := last.metrics) is not None:
        parts.append(f"first after {metrics.time_to_first_token_s:.2f} s")
        if (rate := decode_rate(num_tokens, metrics)) is not None:
            parts.append(f"then {rate:.1f} tokens/s")
        if (spec := metrics.speculative_decoding) is not None:
            accepted, drafted = spec["num_accepted_draft_tokens"], spec["num_draft_tokens"]
            parts.append(f"{accepted} of {drafted} drafted tokens accepted")
            parts.append(f"acceptance length {spec['mean_acceptance_length']:.2f}")
    if not params.greedy:
        parts.append(f"seed {params.seed}")
    return "; ".join(parts)


def decode_rate(num_tokens: int, metrics: RequestMetrics) -> float | None:
    """Tokens per second after the first token, so without the prompt; None where there was nothing to time."""
    return (num_tokens - 1) / metrics.generation_time_s if num_tokens > 1 and metrics.generation_time_s > 0 else None


def _read_form(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise RequestError(f"--structured-outputs is not valid JSON: {error}", "structured_outputs") from None


def _prompt_ids(llm: LLM, text: str, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return llm.tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return llm.tokenizer.apply_chat_template(messages)


def _as_object(model: str, ids: list[int], params: SamplingParams, outputs: list[RequestOutput]) -> dict[str, Any]:
    last = outputs[-1]
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    return {
        "model": model,
        "seed": params.seed,
        "num_prompt_tokens": len(ids),
        "text": "".join(output.text for output in outputs),
        "token_ids": [token for output in outputs for token in output.token_ids],
        "drafted": [flag for output in outputs for flag in output.drafted],
        "logprobs": None if params.logprobs is None else msgspec.to_builtins(logprobs),
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "metrics": msgspec.to_builtins(last.metrics),
    }
