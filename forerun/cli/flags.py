"""Flags in vLLM's way: lists of values, and names that we know but do not serve."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

LISTS = ("--api-key", "--served-model-name", "--logits-processors")

# vLLM's, by which a command line that served there is told what is missing here.
_NAMES = """
    --additional-config --allowed-headers --allowed-methods --allowed-origins --allow-credentials --async-scheduling
    --attention-backend --chat-template --chat-template-content-format --compilation-config --config --cpu-offload-gb
    --data-parallel-size --disable-custom-all-reduce --disable-fastapi-docs --distributed-executor-backend
    --enable-auto-tool-choice --enable-chunked-prefill --enable-expert-parallel --enable-force-include-usage
    --enable-log-requests --enable-lora --enable-prompt-tokens-details --enable-request-id-headers
    --enable-server-load-tracking --enable-sleep-mode --enable-tokenizer-info-endpoint --enforce-eager
    --exclude-tools-when-tool-choice-none --guided-decoding-backend
    --hf-config-path --hf-overrides --hf-token --kv-cache-metrics --kv-transfer-config
    --limit-mm-per-prompt --load-format --logprobs-mode --lora-modules --max-logprobs
    --max-lora-rank --max-loras --max-num-partial-prefills --middleware --model --model-impl --num-gpu-blocks-override
    --optimization-level --override-generation-config --pipeline-parallel-size --prefix-caching-hash-algo
    --reasoning-parser-plugin --response-role --return-tokens-as-token-ids
    --revision --runner --scheduling-policy --skip-tokenizer-init --ssl-ca-certs --ssl-certfile --ssl-keyfile
    --stream-interval --structured-outputs-config --swap-space --task --tensor-parallel-size --tokenizer-mode
    --tokenizer-revision --tool-call-parser --tool-parser-plugin --tool-server --trust-remote-code --uds
    -O -cc -dp -pp -q -tp
"""
NOT_SERVED = frozenset(_NAMES.split())


def repeat_lists(words: Sequence[str]) -> list[str]:
    """`serve MODEL --api-key a b` with the flag before each value. Where MODEL does not come first, a flag takes one
    value, and MODEL may follow it."""
    if len(words) < 2 or words[0] != "serve" or words[1].startswith("-"):
        return list(words)
    repeated: list[str] = []
    flag, num_values = "", 0
    for place, word in enumerate(words):
        if word == "--":
            return [*repeated, *words[place:]]
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            flag, num_values = (name if name in LISTS else ""), len(equals)
        elif flag:
            num_values += 1
            if num_values > 1:
                repeated.append(flag)
        repeated.append(word)
    return repeated


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
