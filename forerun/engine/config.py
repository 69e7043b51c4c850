"""What the engine is told at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.spec.config import SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of the engine; flags of `forerun serve` bear the same names.

    Attributes:
        model: a directory in Hugging Face layout, a .gguf file, or a built-in name (`smollm2-135m`).
        tokenizer: where the tokenizer comes from; None: the model.
        speculative_config: how to draft; None: plain decoding.
        device: "cpu" ("cuda" is not served yet).
        dtype: "auto": quantised and bf16 matrices as they are where the CPU extension is there, others in float32;
            "float32": all in float32.
        max_model_len: longest prompt plus output, tokens; None: the model's own, cut to what the KV cache holds.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step, drafted ones included; longer prompts are computed in chunks.
        max_num_waiting: most requests that wait in a server; one more is refused.
        kv_cache_memory_bytes: memory for KV blocks; None: a quarter of what is free after loading.
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
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 4096
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_waiting",
            "block_size",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ConfigError(f"kv_cache_memory_bytes must be positive, got {self.kv_cache_memory_bytes}")
        if self.device != "cpu":
            raise ConfigError(f"device={self.device!r} is not served yet: use 'cpu'")
        if self.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={self.dtype!r} is not served on a CPU yet: use 'auto' or 'float32'")
