"""`forerun serve`: flags to settings. Their names are vLLM's where they mean the same."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from forerun.cli.speculation import (
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
    tokenizer: Annotated[str | None, _engine("Where the tokenizer comes from; if not given, the model.")] = None,
    max_model_len: Annotated[
        str | None, _engine("Longest prompt plus output: 4096, 4k, 4K or auto.", metavar="TOKENS")] = None,
    max_num_seqs: Annotated[int, _engine("Most requests in one step.")] = 64,
    max_num_batched_tokens: Annotated[str, _engine("Most tokens in one step.", metavar="TOKENS")] = "512",
    max_num_waiting: Annotated[int, _engine("Most requests that wait; one more gets HTTP 503.")] = 4096,
    kv_cache_memory: Annotated[str | None, _engine(
        "Memory for KV blocks: 2GiB, 512MiB, bytes; if not given, a quarter of what is free, or the GPU's share.",
        "--kv-cache-memory", "--kv-cache-memory-bytes", metavar="BYTES")] = None,
    kv_cache_dtype: Annotated[str, _engine(
        "float32, or bfloat16, which holds twice the tokens; auto: bfloat16, unless weights are float32.")] = "auto",
    block_size: Annotated[int, _engine("Tokens a KV block.")] = 16,
    enable_prefix_caching: Annotated[bool, _engine(
        "Reuse KV of prompts that begin alike.", "--enable-prefix-caching/--no-enable-prefix-caching")] = True,
    dtype: Annotated[str, _engine("auto, float32; on a GPU also bfloat16 and float16.")] = "auto",
    quantization: Annotated[str | None, _engine("int8: of floating weights; if not given, as stored.")] = None,
    device: Annotated[str, _engine("cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    gpu_memory_utilization: Annotated[float | None, _engine(
        "Share of the GPU's memory that the engine may fill; if not given, 0.92.")] = None,
    num_threads: Annotated[int | None, _engine("Threads of the CPU's kernels; if not given, PyTorch's choice.")] = None,
    reasoning_parser: Annotated[str | None, _engine(
        "The tags around the model's reasoning: a name, or tags:START,END.", metavar="NAME")] = None,
    logits_processors: Annotated[list[str] | None, _engine(
        "Classes of yours that change logits: A [B ...], see docs/sampling.md.", metavar="MODULE:CLASS")] = None,
    generation_config: Annotated[str, _engine(
        "Sampling values where a request gives none: auto (the model's), vllm (none) or a directory.")] = "auto",
    seed: Annotated[int | None, _engine("Makes the seeds repeatable that requests without one get.")] = None,
    host: Annotated[str, _web("Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, _web("Port to listen on; 0: any free one.")] = 8000,
    api_key: Annotated[list[str] | None, _web(
        "Keys, one of which requests under /v1 must bear: K [K ...]. If not given, VLLM_API_KEY.")] = None,
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
    config = EngineConfig(
        model=target,
        tokenizer=tokenizer,
        speculative_config=spec,
        device=device,
        dtype=dtype,
        quantization=quantization,
        max_model_len=parse_count("--max-model-len", max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=parse_count("--max-num-batched-tokens", max_num_batched_tokens) or 512,
        max_num_waiting=max_num_waiting,
        kv_cache_memory_bytes=parse_bytes("--kv-cache-memory", kv_cache_memory),
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_threads=num_threads,
        reasoning_parser=reasoning_parser,
        logits_processors=tuple(logits_processors or ()),
        generation_config=generation_config,
        seed=seed,
    )
    settings = ServerSettings(
        model=model,
        served_model_names=tuple(served_model_name or ()),
        api_keys=tuple(api_key or ()) or environment_keys(),
        max_body_bytes=parse_bytes("--max-body-size", max_body_size) or 0,
        max_prompts=max_prompts,
        max_messages=max_messages,
        max_text_bytes=parse_bytes("--max-text-size", max_text_size) or 0,
        enable_per_request_metrics=enable_per_request_metrics,
        per_request_spec_decode_metrics=per_request_spec_decode_metrics,
        log_stats=not disable_log_stats,
        log_stats_interval_s=log_stats_interval,
    )
    web = WebSettings(
        host=host,
        port=port,
        shutdown_timeout_s=shutdown_timeout,
        log_level=uvicorn_log_level,
        access_log=not disable_uvicorn_access_log,
        root_path=root_path,
    )
    from forerun.server.run import serve as run  # after all flags are judged: it brings the web server

    log_to_stderr("server")
    for note in notes:
        logger.warning("%s", note)
    raise typer.Exit(run(config, settings, web))


def environment_keys() -> tuple[str, ...]:
    """The key of the environment, for servers whose command line others can read."""
    key = os.environ.get("VLLM_API_KEY")
    return (key,) if key else ()
