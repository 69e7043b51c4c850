"""How much memory the caches may take, and the lines that say so. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from forerun.errors import ConfigError

GIB = 2**30
MIB = 2**20
DEFAULT_SHARE = 0.25  # of what is free once the weights are loaded
GPU_UTILIZATION = 0.92  # of a GPU's memory


def kv_cache_bytes(wanted: int | None, free: int | None = None) -> int:
    """Bytes for KV blocks: what the user asked for, else a quarter of the free memory.

    Args:
        free: bytes; None: what is free now.
    Raises:
        ConfigError: more than there is.
    """
    free = int(psutil.virtual_memory().available) if free is None else free
    if wanted is None:
        return int(free * DEFAULT_SHARE)
    if wanted > free:
        raise ConfigError(
            f"kv_cache_memory={wanted} ({wanted / GIB:.2f} GiB) is more than the {free / GIB:.2f} GiB that are free: "
            "lower it"
        )
    return wanted


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's memory, bytes.

    Attributes:
        total, free: of the GPU.
        pass_bytes: what the largest pass takes beside weights and caches.
        graph_bytes: what graphs will take.
    """

    total: int
    free: int
    pass_bytes: int = 0
    graph_bytes: int = 0


def gpu_allowance(memory: GpuMemory, utilization: float | None) -> int:
    """Bytes that the engine may fill, weights and all, before it has taken any.

    Raises:
        ConfigError: more than is free.
    """
    share = gpu_share(utilization)
    allowed = int(memory.total * share)
    if allowed > memory.free:
        raise ConfigError(
            f"gpu_memory_utilization={share} of {memory.total / GIB:.2f} GiB is {allowed / GIB:.2f} GiB, but only "
            f"{memory.free / GIB:.2f} GiB are free: lower it, or end what else runs on the GPU"
        )
    return allowed


def gpu_cache_bytes(wanted: int | None, memory: GpuMemory, utilization: float | None) -> int:
    """Bytes for KV blocks once the weights are loaded: what the user asked for, else what the utilization leaves, which
    may be nothing or less.

    Raises:
        ConfigError: more is asked for than there is.
    """
    kept = memory.pass_bytes + memory.graph_bytes
    if wanted is None:
        used = memory.total - memory.free
        return int(memory.total * gpu_share(utilization)) - used - kept
    if wanted > memory.free - kept:
        raise ConfigError(
            f"kv_cache_memory={wanted} ({wanted / GIB:.2f} GiB) is more than the {(memory.free - kept) / GIB:.2f} "
            f"GiB that are free on the GPU beside {kept / GIB:.2f} GiB for the largest pass: lower it"
        )
    return wanted


def gpu_share(utilization: float | None) -> float:
    return GPU_UTILIZATION if utilization is None else utilization


def fit_model_len(wanted: int | None, model_limit: int, num_tokens: int) -> int | None:
    """Longest request to serve; None: the cache does not hold what was asked for, or next to nothing.

    Args:
        wanted: what the user asked for; None takes the model's own, cut to what the cache holds.
        model_limit: positions that the model knows.
        num_tokens: tokens that the cache holds.
    Raises:
        ConfigError: `wanted` exceeds the model.
    """
    if wanted is not None and wanted > model_limit:
        raise ConfigError(f"max_model_len={wanted} is more than the {model_limit} positions that the model knows")
    if num_tokens < 2 or (wanted is not None and wanted > num_tokens):
        return None
    return wanted or min(model_limit, num_tokens)


def start_up_lines(
    *,
    device: str,
    load_bytes: int,
    load_time_s: float,
    kv_bytes: int,
    kv_dtype: str,
    num_tokens: int,
    max_model_len: int,
) -> list[str]:
    """What operators grep for, in the form that they know. device: "CPU" or "GPU"."""
    return [
        f"Model loading took {load_bytes / GIB:.2f} GiB memory and {load_time_s:.2f} seconds",
        f"Available KV cache memory: {kv_bytes / GIB:.2f} GiB",
        f"{device} KV cache size: {num_tokens:,} tokens, Maximum concurrency for {max_model_len:,} tokens per request: "
        f"{num_tokens / max_model_len:.2f}x",
        f"KV cache dtype: {kv_dtype}, {kv_bytes // num_tokens:,} bytes per token",
    ]
