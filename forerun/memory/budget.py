"""How much memory the caches may take on a CPU, and the lines that say so. No torch here."""

from __future__ import annotations

import psutil

from forerun.errors import ConfigError

GIB = 2**30
MIB = 2**20
DEFAULT_SHARE = 0.25  # of what is free once the weights are loaded


def kv_cache_bytes(wanted: int | None) -> int:
    """Bytes for KV blocks: what the user asked for, else a quarter of the free memory.

    Raises:
        ConfigError: more than there is.
    """
    free = int(psutil.virtual_memory().available)
    if wanted is None:
        return int(free * DEFAULT_SHARE)
    if wanted > free:
        raise ConfigError(
            f"kv_cache_memory={wanted} ({wanted / GIB:.2f} GiB) is more than the {free / GIB:.2f} GiB that are free: "
            "lower it"
        )
    return wanted


def fit_model_len(wanted: int | None, model_limit: int, num_tokens: int, token_bytes: int) -> int:
    """Longest request to serve.

    Args:
        wanted: what the user asked for; None takes the model's own, cut to what the cache holds.
        model_limit: positions that the model knows.
        num_tokens: tokens that the cache holds.
        token_bytes: bytes of cache per token.
    Raises:
        ConfigError: `wanted` exceeds the model or the cache; the message says what would fit.
    """
    if wanted is not None and wanted > model_limit:
        raise ConfigError(f"max_model_len={wanted} is more than the {model_limit} positions that the model knows")
    if num_tokens < 2 or (wanted is not None and wanted > num_tokens):
        asked = f"max_model_len={wanted}" if wanted is not None else f"the model's length of {model_limit} tokens"
        raise ConfigError(
            f"{asked} needs {(wanted or model_limit) * token_bytes / MIB:,.1f} MiB of KV cache, but kv_cache_memory "
            f"holds {num_tokens} tokens in {num_tokens * token_bytes / MIB:,.1f} MiB: "
            "lower --max-model-len or raise --kv-cache-memory"
        )
    return wanted or min(model_limit, num_tokens)


def start_up_lines(
    *, load_bytes: int, load_time_s: float, kv_bytes: int, kv_dtype: str, num_tokens: int, max_model_len: int
) -> list[str]:
    """What operators grep for, in the form that they know."""
    return [
        f"Model loading took {load_bytes / GIB:.2f} GiB memory and {load_time_s:.2f} seconds",
        f"Available KV cache memory: {kv_bytes / GIB:.2f} GiB",
        f"CPU KV cache size: {num_tokens:,} tokens, Maximum concurrency for {max_model_len:,} tokens per request: "
        f"{num_tokens / max_model_len:.2f}x",
        f"KV cache dtype: {kv_dtype}, {kv_bytes // num_tokens:,} bytes per token",
    ]
