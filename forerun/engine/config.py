"""What the engine is told at start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.spec.config import SpeculativeConfig

THREADS_A_CORE = 4  # more only fight each other
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
        device: "cpu" ("cuda" is not served yet).
        dtype: "auto" computes with the checkpoint's weights as they are stored (4-bit, int8 and bf16 through the CPU
            extension); "float32" with dequantised ones.
        quantization: "int8" makes int8 of floating weights at load; None: as they are stored.
        max_model_len: longest prompt plus output, tokens; None: the model's own, cut to what the KV cache holds.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step, drafted ones included; longer prompts are computed in chunks.
        max_num_waiting: most requests that wait in a server; one more is refused.
        kv_cache_memory_bytes: memory for KV blocks; None: a quarter of what is free after loading.
        kv_cache_dtype: of keys and values, "float32" or "bfloat16", which halves their memory; "auto": bfloat16, or
            float32 where the weights are plain float32.
        block_size: tokens a block.
        enable_prefix_caching: keep full blocks of finished requests for prompts that begin alike.
        num_threads: threads of the CPU's kernels; None: PyTorch's own choice.
        seed: makes the seeds that are drawn for requests without one repeatable; None: fresh ones.
    """

    model: str
    tokenizer: str | None = None
    speculative_config: SpeculativeConfig | None = None
    device: str = "cpu"
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 4096
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        most = THREADS_A_CORE * (os.cpu_count() or 1)
        if self.num_threads is not None and self.num_threads > most:
            raise ConfigError(f"num_threads must be in [1, {most}] on this machine, got {self.num_threads}")
        if self.device != "cpu":
            raise ConfigError(f"device={self.device!r} is not served yet: use 'cpu'")
        if self.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={self.dtype!r} is not served on a CPU yet: use 'auto' or 'float32'")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is not served on a CPU: use {', '.join(KV_CACHE_DTYPES)}"
            )
        if self.quantization not in (None, "int8"):
            raise ConfigError(f"quantization={self.quantization!r} is not served: use 'int8' or leave it out")
        if self.quantization is not None and self.dtype == "float32":
            raise ConfigError("quantization='int8' and dtype='float32' exclude each other: leave one out")
