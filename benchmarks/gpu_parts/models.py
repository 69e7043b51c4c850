"""What is measured: a target and an EAGLE-3 head of published shapes with random weights, and engines around them.

The head has the shapes of RedHatAI/Qwen3-8B-speculator.eagle3 and AngelSlim/Qwen3-8B_eagle3: one layer as wide as the
target's, three of the target's states as input, an output head of its own over 32,000 tokens, the target's embedding.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.engine import build
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.families.values import Values
from forerun.models.heads import eagle3
from forerun.models.heads.blocks import HF
from forerun.models.loading import read_config
from forerun.request import Request
from forerun.spec.config import SpeculativeConfig
from forerun.spec.proposer import RequestDraft
from forerun.testing import ScriptedProposer
from tests.tiny_tokenizer import save_tiny_tokenizer

from .floors import Sizes
from .options import Options

DRAFTED = 3  # K
ACCEPTANCE_LENGTH = 2.4
ROWS_A_STEP = 8192  # max_num_batched_tokens

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
TINY = QWEN3_8B | {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
}
TARGETS = {"qwen3-8b": QWEN3_8B, "tiny": TINY}


def head_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the head for a target of these shapes."""
    return {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": min(32000, target["vocab_size"] // 4),
    }


def random_weight(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    weight = torch.empty(shape, dtype=dtype, device=generator.device)
    return weight.normal_(0, 0.02, generator=generator) if len(shape) > 1 else weight.fill_(1)


class Models:
    """The files of the target (without weights: they are made on the device, once) and of the head.

    Attributes:
        folder, head_folder: where they lie.
        sizes: what a pass has to read.
    """

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder, self.head_folder = folder, folder / "eagle3"
        self._config = TARGETS[options.shapes] | ({"num_hidden_layers": options.layers} if options.layers else {})
        self._decoder: Decoder | None = None
        self.save_target()
        self.sizes = self._sizes(read_config(str(folder)))

    def save_target(self) -> None:
        if not (self.folder / "config.json").exists():
            (self.folder / "config.json").write_text(json.dumps(self._config))
            save_tiny_tokenizer(self.folder)

    def save_head(self) -> None:
        """Write the head's checkpoint, unless it is there."""
        if (self.head_folder / "model.safetensors").exists():
            return
        self.head_folder.mkdir(exist_ok=True)
        generator = torch.Generator(self.options.device).manual_seed(1)
        config = head_config(self._config)
        tensors = {
            name: random_weight(shape, torch.bfloat16, generator).cpu() for name, shape in self._head_shapes().items()
        }
        num_draft = config["draft_vocab_size"]
        ids = torch.randperm(config["vocab_size"], generator=torch.Generator().manual_seed(1))[:num_draft]
        tensors["d2t"] = ids.sort().values - torch.arange(num_draft)
        (self.head_folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, self.head_folder / "model.safetensors")

    def _head_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the head's checkpoint."""
        values = Values(head_config(self._config))
        config = eagle3.from_hf(values, {"lm_head.weight": ()}, read_config(str(self.folder)))
        return {name: slot.shape for name, slot in HF.slots(config.weight_shapes(), config.layers).items()}

    def _sizes(self, target: DecoderConfig) -> Sizes:
        element_bytes = 2 if self.options.device == "cuda" else 4
        head = {name: math.prod(shape) for name, shape in self._head_shapes().items() if len(shape) > 1}
        token_bytes = 2 * target.kv_size * element_bytes
        return Sizes(
            element_bytes=element_bytes,
            weights=sum(math.prod(s) for n, s in target.weight_shapes().items() if len(s) > 1 and n != "embedding"),
            kv_bytes=target.num_layers * token_bytes,
            head_input_weights=head.pop("fc.weight"),
            head_weights=sum(head.values()),
            head_kv_bytes=token_bytes,  # a layer as the target's
        )

    def speculative_config(self, kind: str) -> dict[str, Any] | None:
        """Of an engine: "plain", "scripted" (K drafted tokens from a script) or "eagle3"."""
        drafted = {"num_speculative_tokens": DRAFTED}
        if kind == "eagle3":
            self.save_head()
            rule = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": ACCEPTANCE_LENGTH}
            return {"method": "eagle3", "model": str(self.head_folder), **drafted, **rule}
        return {"method": "ngram", **drafted} if kind == "scripted" else None

    def engine(self, kind: str, *, sized: bool = True) -> Engine:
        """A new engine around the one target.

        Args:
            kind: see `speculative_config`. "scripted" drafts tokens that never stand.
            sized: with a cache for the largest batch; else of the size that the engine chooses.
        """
        spec = self.speculative_config(kind)
        config = EngineConfig(
            model=str(self.folder),
            device=self.options.device,
            dtype="auto" if self.options.device == "cuda" else "float32",
            speculative_config=None if spec is None else SpeculativeConfig.parse(spec),
            max_model_len=self.max_model_len,
            max_num_seqs=max(self.options.batch),
            max_num_batched_tokens=ROWS_A_STEP,
            kv_cache_memory_bytes=self._cache_bytes() if sized else None,
            enable_prefix_caching=False,
            generation_config="vllm",
        )
        with patch.object(build, "load_model", self._load):
            engine = build.build_engine(config)
        if kind == "scripted":
            engine.proposer = ScriptedProposer(_wrong_draft)
        return engine

    def forget(self) -> None:
        """Give the target up."""
        self._decoder = None

    @property
    def vocab_size(self) -> int:
        return int(self._config["vocab_size"])

    @property
    def max_model_len(self) -> int:
        """No request reaches it while it is timed, however lucky its drafts."""
        return max(4096, self.options.prompt + 2 * self.options.room(ROWS_A_STEP))

    def _cache_bytes(self) -> int:
        tokens = max(self.options.batch) * (self.options.prompt + self.options.room(ROWS_A_STEP))
        return (self.sizes.kv_bytes + self.sizes.head_kv_bytes) * max(tokens, 2 * self.max_model_len)

    def _load(self, path: str, dtype: torch.dtype, max_positions: int, **_: object) -> Decoder:
        if self._decoder is None:
            config = read_config(path)
            generator = torch.Generator(self.options.device).manual_seed(0)
            weights = {name: random_weight(s, dtype, generator) for name, s in config.weight_shapes().items()}
            self._decoder = Decoder(config, weights, max_positions)
        return self._decoder


def _wrong_draft(request: Request, length: int) -> RequestDraft:
    """Tokens that never stand, so that each step verifies them and emits one."""
    return RequestDraft([(request.token_ids[-1] + 1 + i) % 500 for i in range(length)], "scripted")


def release_memory() -> None:
    """What engines that are no longer referred to held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
