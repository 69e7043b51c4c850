"""Flags in vLLM's way: lists of values, and names that we know but do not serve."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError

LISTS = (
    "--api-key",
    "--served-model-name",
    "--logits-processors",
    "--allowed-origins",
    "--allowed-methods",
    "--allowed-headers",
)
NEGATABLE = ("--async-scheduling", "--enable-prefix-caching", "--enable-prompt-tokens-details")  # on by themselves

# vLLM's, by which a command line that served there is told what is missing here.
_NAMES = """
    --additional-config --aggregate-engine-logging --all2all-backend --allow-deprecated-quantization
    --allowed-local-media-path --allowed-media-domains
    --api-server-count --attention-backend --attention-config --calculate-kv-scales
    --chat-template-content-format --code-revision --collect-detailed-traces --compilation-config --config-format
    --convert --cp-kv-cache-interleave-size --cpu-offload-gb --cudagraph-capture-sizes --custom-histogram-buckets
    --data-parallel-address --data-parallel-backend --data-parallel-external-lb --data-parallel-hybrid-lb
    --data-parallel-rank --data-parallel-rpc-port --data-parallel-size --data-parallel-size-local
    --data-parallel-start-rank --dbo-decode-token-threshold --dbo-prefill-token-threshold
    --dcp-kv-cache-interleave-size --decode-context-parallel-size --default-chat-template-kwargs --default-mm-loras
    --disable-access-log-for-endpoints --disable-cascade-attn --disable-chunked-mm-input --disable-custom-all-reduce
    --disable-fastapi-docs --disable-frontend-multiprocessing --disable-hybrid-kv-cache-manager --disable-log-requests
    --disable-nccl-for-dp-synchronization --disable-sliding-window --distributed-executor-backend --download-dir
    --ec-transfer-config --enable-chunked-prefill --enable-dbo --enable-elastic-ep --enable-ep-weight-filter
    --enable-eplb --enable-expert-parallel --enable-flashinfer-autotune --enable-layerwise-nvtx-tracing
    --enable-log-deltas --enable-log-outputs --enable-log-requests --enable-logging-iteration-details --enable-lora
    --enable-lora-bias --enable-mfu-metrics --enable-mm-embeds --enable-offline-docs --enable-prompt-embeds
    --enable-request-id-headers --enable-return-routed-experts --enable-scale-out --enable-server-load-tracking
    --enable-sleep-mode --enable-ssl-refresh --enable-tokenizer-info-endpoint --enable-tower-connector-lora
    --enforce-eager --eplb-config --expert-placement-strategy --fully-sharded-loras
    --guided-decoding-backend --h11-max-header-count --h11-max-incomplete-event-size --headless --hf-config-path
    --hf-overrides --hf-token --ignore-patterns --interleave-mm-strings --io-processor-plugin --kernel-config
    --kv-cache-metrics --kv-cache-metrics-sample --kv-events-config --kv-offloading-backend --kv-offloading-size
    --kv-sharing-fast-prefill --kv-transfer-config --language-model-only --limit-mm-per-prompt --load-format
    --log-config-file --log-error-stack --logits-processor-pattern --logprobs-mode
    --long-prefill-token-threshold --lora-dtype --lora-modules --lora-target-modules --mamba-block-size
    --mamba-cache-dtype --mamba-cache-mode --mamba-ssm-cache-dtype --master-addr --master-port --max-cpu-loras
    --max-cudagraph-capture-size --max-log-len --max-logprobs --max-long-partial-prefills --max-lora-rank --max-loras
    --max-num-partial-prefills --max-parallel-loading-workers --media-io-kwargs --middleware --mm-encoder-attn-backend
    --mm-encoder-only --mm-encoder-tp-mode --mm-processor-cache-gb --mm-processor-cache-type --mm-processor-kwargs
    --mm-shm-cache-max-object-size-mb --model --model-impl --model-loader-extra-config --moe-backend --nnodes
    --no-enable-chunked-prefill --node-rank --num-gpu-blocks-override --num-lookahead-slots
    --offload-backend --optimization-level --otlp-traces-endpoint --override-attention-dtype
    --override-generation-config --performance-mode --pipeline-parallel-size --pooler-config
    --prefill-context-parallel-size --prefix-caching-hash-algo --profiler-config --pt-load-map-location
    --ray-workers-use-nsight --reasoning-config --reasoning-parser-plugin --renderer-num-workers --response-role
    --revision --runner --safetensors-load-strategy --scheduler-cls --scheduler-reserve-full-isl --scheduling-policy
    --show-hidden-metrics-for-version --skip-mm-profiling --skip-tokenizer-init --specialize-active-lora
    --stream-output
    --structured-outputs-config --swap-space --task --tensor-parallel-size --tokenizer-mode --tokenizer-revision
    --tokens-only --tool-parser-plugin --tool-server --trust-remote-code --trust-request-chat-template
    --ubatch-size --use-tqdm-on-load --video-pruning-rate --weight-transfer-config --worker-cls --worker-extension-cls
    -O -asc -cc -dcp -dp -dpa -dpb -dpl -dpn -dpr -ep -n -pcp -pp -q -r -tp
"""
NOT_SERVED = frozenset(_NAMES.split())


def repeat_lists(words: Sequence[str]) -> list[str]:
    """`serve MODEL --api-key a b` with the flag before each value. Where MODEL does not come first, a flag takes one
    value, and MODEL may follow it."""
    if len(words) < 2 or words[0] != "serve" or words[1].startswith("-"):
        return list(words)
    return repeat_flags(words, LISTS)


def repeat_flags(words: Sequence[str], lists: Sequence[str]) -> list[str]:
    """The words with a flag of `lists` before each of its values."""
    repeated: list[str] = []
    flag, num_values = "", 0
    for place, word in enumerate(words):
        if word == "--":
            return [*repeated, *words[place:]]
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            flag, num_values = (name if name in lists else ""), len(equals)
        elif flag:
            num_values += 1
            if num_values > 1:
                repeated.append(flag)
        repeated.append(word)
    return repeated


def with_config(words: Sequence[str]) -> list[str]:
    """`serve` with the flags of `--config FILE` in front of its own, which win. The file is YAML, as vLLM's: names of
    flags without the dashes, true for a switch, a list for several values, an object for JSON; `model` is the model.

    Raises:
        ConfigError: no such file, or it is something else.
    """
    if not words or words[0] != "serve":
        return list(words)
    own, path = _take_option(words, "--config")
    if path is None:
        return own
    given = {word.partition("=")[0] for word in own if word.startswith("--")}
    settings = _read_yaml(path)
    model = settings.pop("model", None)
    flags: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if not given & {flag, f"--no-{name.replace('_', '-')}"}:
            flags += _as_words(path, flag, value)
    has_model = len(own) > 1 and not own[1].startswith("-")
    models = own[1:2] if has_model else [] if model is None else [str(model)]
    return ["serve", *models, *flags, *own[1 + has_model :]]


def _take_option(words: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """The words without an option, and its value."""
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag != name:
            continue
        if equals:
            return [*words[:place], *words[place + 1 :]], value
        if place + 1 == len(words):
            raise ConfigError(f"{name} needs the name of a file")
        return [*words[:place], *words[place + 2 :]], words[place + 1]
    return list(words), None


def _read_yaml(path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config {path} is no YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path} must hold names of flags with their values, one a line")
    return content


def _as_words(path: str, flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"] if value or flag in NEGATABLE else []
    if isinstance(value, list):
        return [word for item in value for word in (flag, str(item))]
    if value is None:
        raise ConfigError(f"--config {path}: {flag.removeprefix('--')} has no value")
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def usage_mistake(error: Exception, words: Sequence[str]) -> str | None:
    """One line for an exception of the option parser; None for any other. Its classes are typer's or click's own,
    whichever the version of typer brings, so they are known by their attributes."""
    if not hasattr(error, "format_message"):
        return None
    name = getattr(error, "option_name", None)
    if type(error).__name__ != "NoSuchOption" or name is None:
        message = str(error.format_message()).rstrip(".")
        return message[:1].lower() + message[1:]
    flag = str(name)
    if not flag.startswith("--"):  # of -tp it says -t
        flag = next((word.partition("=")[0] for word in words if word.startswith(flag)), flag)
    if flag in NOT_SERVED or name in NOT_SERVED:
        return f"{flag} is not served yet"
    context = getattr(error, "ctx", None)
    known = [option for p in context.command.params for option in (*p.opts, *p.secondary_opts)] if context else []
    nearest = difflib.get_close_matches(flag, [option for option in known if option.startswith("--")], n=1)
    return f"unknown flag {flag}" + (f": did you mean {nearest[0]}?" if nearest else "")
