"""`forerun serve`: flags to settings. Their names are vLLM's where they mean the same."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

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
from forerun.engine.config import EngineConfig
from forerun.engine.core import log_to_stderr
from forerun.errors import ConfigError
from forerun.parsers.tools import TOOL_FORMATS
from forerun.server.settings import ServerSettings, SpecDecodeMetrics, WebSettings

logger = logging.getLogger("forerun.cli")

_COUNT_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_count(flag: str, text: str | None) -> int | None:
    """A number of tokens: 4096, 1k (1000), 1K (1024), 25.6k; None for none, "auto" and "-1".

    Raises:
        ConfigError: anything else.
    """
    if text is None or text in ("auto", "-1"):
        return None
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2] not in _COUNT_UNITS:
        raise ConfigError(f"{flag} must be a number such as 4096, 4k (4000) or 4K (4096), or 'auto', got {text!r}")
    return _whole(flag, match[1], _COUNT_UNITS[match[2]], text)


def parse_bytes(flag: str, text: str | None) -> int | None:
    """A number of bytes: 1073741824, 512MiB, 1.5GiB, 2GB (10^9).

    Raises:
        ConfigError: anything else.
    """
    if text is None:
        return None
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2].lower() not in _BYTE_UNITS:
        raise ConfigError(f"{flag} must be bytes such as 1073741824, 512MiB, 1.5GiB or 2GB, got {text!r}")
    return _whole(flag, match[1], _BYTE_UNITS[match[2].lower()], text)


def _whole(flag: str, number: str, unit: int, text: str) -> int:
    amount = float(number) * unit if "." in number else int(number) * unit
    if not 0 < amount < 2**63:
        raise ConfigError(f"{flag} must be above 0 and below 2^63, got {text!r}")
    return round(amount)


def _panel(title: str) -> Callable[..., Any]:
    """Makes options that stand together in the help."""

    def option(help: str, *names: str, metavar: str | None = None) -> Any:
        return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=title)

    return option


_engine, _web, _log = _panel("Engine"), _panel("Web server"), _panel("Logs and metrics")
_chat = _panel("Conversations")

# fmt: off


def serve(
    model: Annotated[str, typer.Argument(help="A directory in Hugging Face layout, a .gguf file or a built-in name.")],
    speculative_config: SpeculativeConfigOption = None,
    spec_method: SpecMethodOption = None,
    spec_model: SpecModelOption = None,
    spec_tokens: SpecTokensOption = None,
    speculative_model: LegacyModelOption = None,
    num_speculative_tokens: LegacyTokensOption = None,
    spec_note: SpecNotesOption = None,
    batch_invariant: BatchInvariantOption = False,
    tokenizer: Annotated[str | None, _engine("Where the tokenizer comes from; if not given, the model.")] = None,
    max_model_len: Annotated[
        str | None, _engine("Longest prompt plus output: 4096, 4k, 4K or auto.", metavar="TOKENS")] = None,
    max_num_seqs: Annotated[int | None, _engine(
        "Most requests in one step; if not given, 64, on a GPU 256.")] = None,
    max_num_batched_tokens: Annotated[str | None, _engine(
        "Most tokens in one step; if not given, 512, on a GPU 2048 or 8192.", metavar="TOKENS")] = None,
    max_num_waiting: Annotated[int, _engine("Most requests that wait; one more gets HTTP 503.")] = 4096,
    restart_engine: Annotated[bool, _engine(
        "Start another engine where it dies; if not given, the server ends.", "--restart-engine")] = False,
    max_engine_restarts: Annotated[int, _engine("With --restart-engine: most restarts in a row.")] = 5,
    request_timeout: Annotated[float | None, _engine(
        "Most time for a request, waiting included; if not given, no limit.", metavar="SECONDS")] = None,
    kv_cache_memory: Annotated[str | None, _engine(
        "Memory for KV blocks: 2GiB, 512MiB, bytes; if not given, a quarter of what is free, or the GPU's share.",
        "--kv-cache-memory", "--kv-cache-memory-bytes", metavar="BYTES")] = None,
    kv_cache_dtype: Annotated[str, _engine(
        "float32, or bfloat16, which holds twice the tokens; auto: bfloat16, unless weights are float32.")] = "auto",
    block_size: Annotated[int, _engine("Tokens a KV block.")] = 16,
    enable_prefix_caching: Annotated[bool, _engine(
        "Reuse KV of prompts that begin alike.", "--enable-prefix-caching/--no-enable-prefix-caching")] = True,
    async_scheduling: Annotated[bool | None, _engine(
        "Launch a step before the one in flight is read; if not given, on a GPU.",
        "--async-scheduling/--no-async-scheduling")] = None,
    dtype: Annotated[str, _engine("auto, float32; on a GPU also bfloat16 and float16.")] = "auto",
    quantization: Annotated[str | None, _engine("int8: of floating weights; if not given, as stored.")] = None,
    device: Annotated[str, _engine("cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    gpu_memory_utilization: Annotated[float | None, _engine(
        "Share of the GPU's memory that the engine may fill; if not given, 0.92.")] = None,
    num_threads: Annotated[int | None, _engine("Threads of the CPU's kernels; if not given, PyTorch's choice.")] = None,
    reasoning_parser: Annotated[str | None, _engine(
        "How the model marks its reasoning: qwen3, deepseek_r1, or tags:START,END.", metavar="NAME")] = None,
    logits_processors: Annotated[list[str] | None, _engine(
        "Classes of yours that change logits: A [B ...], see docs/sampling.md.", metavar="MODULE:CLASS")] = None,
    generation_config: Annotated[str, _engine(
        "Sampling values where a request gives none: auto (the model's), vllm (none) or a directory.")] = "auto",
    seed: Annotated[int | None, _engine("Makes the seeds repeatable that requests without one get.")] = None,
    config: Annotated[str | None, _engine(
        "A YAML file of flags without their dashes; those of the command line win.", metavar="FILE")] = None,
    chat_template: Annotated[str | None, _chat(
        "A Jinja template, or a file that holds one; if not given, the model's.", metavar="FILE")] = None,
    tool_call_parser: Annotated[str | None, _chat(
        f"How the model writes tool calls: {', '.join(TOOL_FORMATS)}, or tags:START,END.", metavar="NAME")] = None,
    enable_auto_tool_choice: Annotated[bool, _chat(
        "The model may call the tools of a request.", "--enable-auto-tool-choice")] = False,
    exclude_tools_when_tool_choice_none: Annotated[bool, _chat(
        "Tools that must not be called are not shown.", "--exclude-tools-when-tool-choice-none")] = False,
    max_stored_responses: Annotated[str, _chat(
        "Memory for responses that others go on from; 0: none are kept.", metavar="BYTES")] = "64MiB",
    return_tokens_as_token_ids: Annotated[bool, _chat(
        "Log-probabilities name tokens by their ids.", "--return-tokens-as-token-ids")] = False,
    stream_interval: Annotated[int, _chat("Tokens that a chunk of a stream waits for, after the first.")] = 1,
    enable_force_include_usage: Annotated[bool, _chat(
        "Every stream ends with its usage.", "--enable-force-include-usage")] = False,
    enable_prompt_tokens_details: Annotated[bool, _chat(
        "A usage says how many of the prompt's tokens were cached.",
        "--enable-prompt-tokens-details/--no-enable-prompt-tokens-details")] = True,
    host: Annotated[str, _web("Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, _web("Port to listen on; 0: any free one.")] = 8000,
    api_key: Annotated[list[str] | None, _web(
        "Keys, one of which requests under /v1 must bear: K [K ...]. Other users see them in the process list: rather "
        "use a file, or FORERUN_API_KEY or VLLM_API_KEY, which count where no key is given.")] = None,
    api_key_file: Annotated[str | None, _web("Keys, one a line.", metavar="FILE")] = None,
    salt_by_api_key: Annotated[bool, _web(
        "Keep caches apart by key, so that no key's texts speed up another's.", "--salt-by-api-key")] = False,
    uds: Annotated[str | None, _web("Unix socket to listen on, in the place of host and port.", metavar="PATH")] = None,
    ssl_keyfile: Annotated[str | None, _web("TLS: the key.", metavar="FILE")] = None,
    ssl_certfile: Annotated[str | None, _web("TLS: the certificate; if not given, plain HTTP.", metavar="FILE")] = None,
    ssl_ca_certs: Annotated[str | None, _web("TLS: who signs clients' certificates.", metavar="FILE")] = None,
    ssl_cert_reqs: Annotated[int, _web("TLS: whether clients need one: 0 no, 1 may, 2 must.")] = 0,
    allowed_origins: Annotated[list[str] | None, _web(
        "Web pages that browsers let use the server: O [O ...], or * for all. If not given, none.")] = None,
    allowed_methods: Annotated[list[str] | None, _web("Methods that they may use; if not given, all.")] = None,
    allowed_headers: Annotated[list[str] | None, _web("Headers that they may send; if not given, all.")] = None,
    allow_credentials: Annotated[bool, _web("Let them send cookies and the like.", "--allow-credentials")] = False,
    max_connections: Annotated[int, _web("Most connections at a time; one more gets HTTP 503.")] = 4096,
    receive_timeout: Annotated[float, _web("Most time for a request to arrive.", metavar="SECONDS")] = 120.0,
    send_timeout: Annotated[float, _web(
        "Most time that a client may take nothing of an answer that waits for it.", metavar="SECONDS")] = 60.0,
    keep_alive_timeout: Annotated[int, _web("How long idle connections are kept.", metavar="SECONDS")] = 5,
    served_model_name: Annotated[list[str] | None, _web(
        "Names that requests may use: A [B ...]. If not given, MODEL.")] = None,
    max_body_size: Annotated[str, _web("Longest request body.", metavar="BYTES")] = "16MiB",
    max_prompts: Annotated[int, _web("Most prompts of a request.")] = 1024,
    max_messages: Annotated[int, _web("Most messages of a request, parts of their contents included.")] = 4096,
    max_text_size: Annotated[str, _web("Most text of a request's prompts or messages.", metavar="BYTES")] = "4MiB",
    root_path: Annotated[str, _web("Path prefix that a proxy takes off.")] = "",
    shutdown_timeout: Annotated[int, _web("How long answers may go on after a signal.", metavar="SECONDS")] = 20,
    uvicorn_log_level: Annotated[str, _log("critical, error, warning, info, debug or trace.")] = "info",
    disable_uvicorn_access_log: Annotated[bool, _log("No line a request.", "--disable-uvicorn-access-log")] = False,
    disable_log_stats: Annotated[bool, _log("No periodic lines, no metrics.", "--disable-log-stats")] = False,
    log_stats_interval: Annotated[float, _log("Time between the periodic lines.", metavar="SECONDS")] = 10.0,
    enable_per_request_metrics: Annotated[bool, _log(
        "Times of a request in its answer.", "--enable-per-request-metrics")] = False,
    per_request_spec_decode_metrics: Annotated[SpecDecodeMetrics, _log(
        "What speculation did for a request, in its answer.")] = "none",
) -> None:
    """Serve a model over HTTP, in OpenAI's form.

    Draft with --speculative-config (see `forerun config`); the answers do not change by it.
    """
    # fmt: on
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
    engine = EngineConfig(
        model=target,
        tokenizer=tokenizer,
        speculative_config=spec,
        device=device,
        dtype=dtype,
        quantization=quantization,
        max_model_len=parse_count("--max-model-len", max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=parse_count("--max-num-batched-tokens", max_num_batched_tokens),
        max_num_waiting=max_num_waiting,
        max_engine_restarts=max_engine_restarts if restart_engine else 0,
        request_timeout_s=request_timeout,
        kv_cache_memory_bytes=parse_bytes("--kv-cache-memory", kv_cache_memory),
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling,
        batch_invariant=batch_invariant,
        num_threads=num_threads,
        reasoning_parser=reasoning_parser,
        logits_processors=tuple(logits_processors or ()),
        generation_config=generation_config,
        seed=seed,
    )
    stored = None if max_stored_responses == "0" else parse_bytes("--max-stored-responses", max_stored_responses)
    settings = ServerSettings(
        model=model,
        served_model_names=tuple(served_model_name or ()),
        api_keys=api_keys(api_key or (), api_key_file),
        salt_by_api_key=salt_by_api_key,
        allowed_origins=words(allowed_origins, ()),
        allowed_methods=words(allowed_methods, ("*",)),
        allowed_headers=words(allowed_headers, ("*",)),
        allow_credentials=allow_credentials,
        max_body_bytes=parse_bytes("--max-body-size", max_body_size) or 0,
        max_prompts=max_prompts,
        max_messages=max_messages,
        max_text_bytes=parse_bytes("--max-text-size", max_text_size) or 0,
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
        exclude_tools_when_tool_choice_none=exclude_tools_when_tool_choice_none,
        max_stored_response_bytes=stored or 0,
        return_tokens_as_token_ids=return_tokens_as_token_ids,
        stream_interval=stream_interval,
        enable_force_include_usage=enable_force_include_usage,
        enable_prompt_tokens_details=enable_prompt_tokens_details,
        chat_template=read_template(chat_template),
        enable_per_request_metrics=enable_per_request_metrics,
        per_request_spec_decode_metrics=per_request_spec_decode_metrics,
        log_stats=not disable_log_stats,
        log_stats_interval_s=log_stats_interval,
    )
    web = WebSettings(
        host=host,
        port=port,
        uds=uds,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        ssl_ca_certs=ssl_ca_certs,
        ssl_cert_reqs=ssl_cert_reqs,
        max_connections=max_connections,
        receive_timeout_s=receive_timeout,
        send_timeout_s=send_timeout,
        keep_alive_timeout_s=keep_alive_timeout,
        shutdown_timeout_s=shutdown_timeout,
        log_level=uvicorn_log_level,
        access_log=not disable_uvicorn_access_log,
        root_path=root_path,
    )
    from forerun.server.run import serve as run  # after all flags are judged: it brings the web server

    log_to_stderr("server")
    for note in notes:
        logger.warning("%s", note)
    raise typer.Exit(run(engine, settings, web))


def read_template(given: str | None) -> str | None:
    """`--chat-template`: what the file holds, or the template itself.

    Raises:
        ConfigError: no such file, and no template either.
    """
    if given is None or any(mark in given for mark in ("{{", "{%", "\n")):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {given}: {getattr(error, 'strerror', None) or 'it is no text'}") from None


def api_keys(given: Sequence[str], file: str | None) -> tuple[str, ...]:
    """The keys of the command line and of the file; where there are none, the environment's.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    keys = [*given]
    if file is not None:
        try:
            lines = Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"--api-key-file {file} holds no key: write one a line")
        keys += found
    return tuple(keys) or environment_keys()


def environment_keys() -> tuple[str, ...]:
    """The key of the environment, for servers whose command line others can read."""
    key = os.environ.get("FORERUN_API_KEY") or os.environ.get("VLLM_API_KEY")
    return (key,) if key else ()


def words(given: Sequence[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Values given one by one, or, as vLLM has it, as one JSON list."""
    if given is None:
        return default
    found: list[str] = []
    for text in given:
        try:
            value = json.loads(text) if text.startswith("[") else [text]
        except json.JSONDecodeError:
            value = None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ConfigError(f"a list must be words or one JSON list of texts, got {text!r}")
        found += value
    return tuple(found)
