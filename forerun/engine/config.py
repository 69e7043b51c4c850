"""What the engine is told at start."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from forerun.errors import ConfigError
from forerun.parsers.formats import reasoning_format

if TYPE_CHECKING:
    from forerun.sampling.processors.custom import RowProcessor
    from forerun.spec.config import SpeculativeConfig

THREADS_A_CORE = 4  # more only fight each other
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CPU_LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
GPU_LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
LARGE_GPU_LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
LARGE_GPU_BYTES = 64 << 30  # of memory: what the activations of so many rows take does not count there
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16")
COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_waiting",
    "kv_cache_memory_bytes",
    "block_size",
    "num_threads",
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the engine; flags of `forerun serve` bear the same names.

    Attributes:
        model: a directory in Hugging Face layout, a .gguf file, or a built-in name (`smollm2-135m`).
        tokenizer: where the tokenizer comes from; None: the model.
        speculative_config: how to draft; None: plain decoding.
        device: "cpu", "cuda", or "auto": a GPU where there is one that can be used.
        dtype: "auto" computes on a CPU with the checkpoint's weights as they are stored (4-bit, int8 and bf16 through
            the CPU extension), on a GPU in float16 where the checkpoint says so and else in bfloat16; "float32",
            "bfloat16" and "float16" (these two on a GPU only) with dequantised ones.
        quantization: "int8" makes int8 of floating weights at load, on a CPU only; None: as they are stored.
        max_model_len: longest prompt plus output, tokens; None: the model's own, cut to what the KV cache holds.
        max_num_seqs: most requests in one step; None: 64, on a GPU 256.
        max_num_batched_tokens: most tokens in one step, drafted ones included; longer prompts are computed in chunks.
            None: 512, on a GPU 2048, from 64 GiB of memory on 8192.
        max_num_waiting: most requests that wait in a server; one more is refused.
        max_engine_restarts: most times in a row that a server starts another engine in the place of one that died; 0:
            none, and the server ends.
        request_timeout_s: most seconds that a server gives a request, waiting included; None: no limit.
        kv_cache_memory_bytes: memory for KV blocks; None: on a CPU a quarter of what is free after loading, on a GPU
            what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of the GPU's memory that the engine may fill; None: 0.92. Without effect on a CPU,
            and where `kv_cache_memory_bytes` is given.
        kv_cache_dtype: of keys and values, "float32" or "bfloat16", which halves their memory; "auto": what the model
            computes in, on a CPU bfloat16 unless the weights are plain float32.
        block_size: tokens a block.
        async_scheduling: launch a step before the one in flight is read, where nothing of that has to be known; None:
            on a GPU.
        batch_invariant: on a GPU too a request's text must not depend on drafts, nor on who else is served: each row
            is added up in one order in any company, which takes longer. Needs Triton. On a CPU this always holds, and
            the setting is without effect.
        enable_prefix_caching: keep full blocks of finished requests for prompts that begin alike.
        num_threads: threads of the CPU's kernels; None: PyTorch's own choice.
        reasoning_parser: the tags that the model puts around its reasoning: a name of `parsers/formats.py`, or a pair
            as `tags:START,END`: what a request asks of the form of its text holds from the reasoning's end on. None:
            texts have no reasoning.
        logits_processors: the user's own classes, or their names as `module:Class` (sampling/processors/custom.py).
        generation_config: where sampling values come from that a request leaves out: "auto": the model's
            generation_config.json, "vllm": nowhere, or a directory that holds such a file.
        seed: makes the seeds that are drawn for requests without one repeatable; None: fresh ones.
    """

    model: str
    tokenizer: str | None = None
    speculative_config: SpeculativeConfig | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_waiting: int = 4096
    max_engine_restarts: int = 0
    request_timeout_s: float | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    async_scheduling: bool | None = None
    batch_invariant: bool = False
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    reasoning_parser: str | None = None
    logits_processors: tuple[str | type[RowProcessor], ...] = ()
    generation_config: str = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if type(self.max_engine_restarts) is not int or self.max_engine_restarts < 0:
            raise ConfigError(f"max_engine_restarts must be at least 0, got {self.max_engine_restarts!r}")
        if self.request_timeout_s is not None and not 0 < self.request_timeout_s < math.inf:
            raise ConfigError(f"request_timeout must be above 0 seconds, got {self.request_timeout_s!r}")
        most = THREADS_A_CORE * (os.cpu_count() or 1)
        if self.num_threads is not None and self.num_threads > most:
            raise ConfigError(f"num_threads must be in [1, {most}] on this machine, got {self.num_threads}")
        for name, known in (("device", DEVICES), ("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not served: use {', '.join(known)}")
        share = self.gpu_memory_utilization
        if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {share!r}")
        if self.reasoning_parser is not None:
            reasoning_format(self.reasoning_parser)
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        if self.quantization not in (None, "int8"):
            raise ConfigError(f"quantization={self.quantization!r} is not served: use 'int8' or leave it out")
        if self.quantization is not None and self.dtype != "auto":
            raise ConfigError(f"quantization='int8' and dtype={self.dtype!r} exclude each other: leave one out")

    def settle(self, gpu_bytes: int | None) -> SettledConfig:
        """With what depends on the device. gpu_bytes: a GPU's memory; None: it is a CPU."""
        limits = CPU_LIMITS
        if gpu_bytes is not None:
            limits = LARGE_GPU_LIMITS if gpu_bytes >= LARGE_GPU_BYTES else GPU_LIMITS
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return SettledConfig(**values | {name: values[name] or limit for name, limit in limits.items()})


@dataclass(frozen=True, kw_only=True)
class SettledConfig(EngineConfig):
    """Settings for a device that is known."""

    max_num_seqs: int = CPU_LIMITS["max_num_seqs"]
    max_num_batched_tokens: int = CPU_LIMITS["max_num_batched_tokens"]
