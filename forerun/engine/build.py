"""Puts an engine together from its settings: the one place that knows every part."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.engine import gpu
from forerun.engine.cache import CachePool
from forerun.engine.config import EngineConfig
from forerun.engine.device import find_device
from forerun.engine.engine import Engine
from forerun.engine.messages import EngineInfo
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Scheduler
from forerun.errors import ConfigError
from forerun.kernels import check_row_exactness, native
from forerun.kernels.fused import PlainLinear
from forerun.memory.budget import fit_model_len, kv_cache_bytes, start_up_lines
from forerun.memory.groups import GroupSpec
from forerun.models.builtin import resolve_model
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder, attention_spec
from forerun.models.generation_config import sampling_defaults
from forerun.models.loading import load_model, read_config
from forerun.models.paged import KV_DTYPES, PagedModel, new_memory
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.parsers.formats import reasoning_format
from forerun.sampling.processors import LogitsProcessor
from forerun.sampling.processors.bad_words import BadWords
from forerun.sampling.processors.bias import AllowedTokens, LogitBias
from forerun.sampling.processors.custom import CustomProcessors, RowProcessor, load_processors
from forerun.sampling.processors.minimum import MinTokens
from forerun.sampling.processors.penalties import Penalties
from forerun.sampling.processors.thinking import ThinkingBudget
from forerun.spec.control import make_control
from forerun.spec.heads import complete
from forerun.spec.proposer import TargetInfo
from forerun.spec.proposers.first import FirstOf
from forerun.spec.registry import make_proposer, make_verifier

CPU_DTYPES = ("auto", "float32")


@dataclass(frozen=True)
class Target:
    """The model that is served, with its tokenizer.

    Attributes:
        packed: whether weights stay as the checkpoint stores them.
    """

    config: DecoderConfig
    model: Decoder
    packed: bool
    tokenizer: Tokenizer
    load_time_s: float

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(sorted({*self.tokenizer.eos_token_ids, *self.config.eos_token_ids}))


@dataclass(frozen=True)
class Caches:
    """The memory of keys and values.

    Attributes:
        num_bytes: of the pool, and of what lies beside it.
        dtype: of the target's.
        max_model_len: the longest request that they can serve, tokens.
    """

    pool: CachePool
    num_bytes: int
    dtype: torch.dtype
    max_model_len: int


def build_engine(config: EngineConfig) -> Engine:
    """Load the models and the tokenizer, size the caches, and connect the parts.

    Raises:
        ConfigError: the settings, the files or the memory do not allow it. Settings are judged before weights load.
    """
    _set_num_threads(config.num_threads)
    custom = load_processors(config.logits_processors)
    device, obstacle = find_device(config.device)
    _check_device(config, device)
    path = str(resolve_model(config.model))
    defaults = sampling_defaults(config.generation_config, path)
    model_config = read_config(path)
    config, head_notes = _complete(config, model_config)
    shape = attention_spec(model_config, config.block_size).shape
    least_dtype = KV_DTYPES.get(config.kv_cache_dtype, torch.bfloat16)
    most_bytes = _most_cache_bytes(config, device)
    _fit(config, model_config, shape.block_bytes(least_dtype.itemsize), most_bytes)
    target = _load_target(config, path, model_config, device)
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, target.model.kv_dtype)
    proposer = make_proposer(config.speculative_config, _target_info(config, target, kv_dtype))

    caches = _size_caches(config, target, kv_dtype, proposer)
    memory = new_memory(caches.pool.num_bytes, device)
    proposer.attach_all(memory, caches.pool.num_target_blocks)
    alone = len(caches.pool.groups) == 1
    paged = PagedModel.over(target.model, memory, kv_dtype, config.block_size, alone=alone)
    notes = [*_defaults_note(defaults), *head_notes, *proposer.notes]
    if device.type != "cpu":
        paged, line = gpu.record(paged, config, caches.max_model_len, proposer.hidden_taps)
        notes = [line, *notes] if line else notes
    if obstacle is not None:
        notes.append(f"WARNING: {obstacle}")
    return Engine(
        runner=Runner(paged, proposer.hidden_taps),
        scheduler=Scheduler(
            caches.pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            on_release=proposer.forget,
            scratch_tokens=max((group.scratch_tokens for group in proposer.groups_beside), default=0),
            hash_look_ahead=1 if proposer.groups_beside else 0,
        ),
        proposer=proposer,
        verifier=make_verifier(config.speculative_config),
        control=make_control(config.speculative_config),
        processors=_processors(config, target, custom),
        tokenizer=target.tokenizer,
        eos_token_ids=target.eos_token_ids,
        info=_info(config, target, caches, defaults, notes),
    )


def _processors(config: EngineConfig, target: Target, custom: Sequence[RowProcessor]) -> list[LogitsProcessor]:
    """In the order in which they change logits, which is vLLM's; what is forced comes last."""
    format = None if config.reasoning_parser is None else reasoning_format(config.reasoning_parser)
    return [
        LogitBias(),
        AllowedTokens(),
        BadWords(target.tokenizer),
        MinTokens(),
        CustomProcessors(custom),
        Penalties(),
        ThinkingBudget(target.tokenizer, format),
    ]


def _defaults_note(defaults: Mapping[str, Any]) -> list[str]:
    if not defaults:
        return []
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return [f"Sampling values where a request gives none: {values} (--generation-config vllm: without them)"]


def _complete(config: EngineConfig, target: DecoderConfig) -> tuple[EngineConfig, Sequence[str]]:
    """The settings with what the headers of draft heads say, and lines for the log."""
    if config.speculative_config is None:
        return config, ()
    speculative_config, notes = complete(config.speculative_config, target)
    return dataclasses.replace(config, speculative_config=speculative_config), notes


def _target_info(config: EngineConfig, target: Target, kv_dtype: torch.dtype) -> TargetInfo:
    return TargetInfo(
        name=config.model,
        model=target.model,
        tokenizer=target.tokenizer,
        max_model_len=config.max_model_len or target.config.max_position_embeddings,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_dtype=kv_dtype,
        packed=target.packed,
    )


def _check_device(config: EngineConfig, device: torch.device) -> None:
    """Fail where the device cannot do what was asked for."""
    if device.type == "cpu" and config.dtype not in CPU_DTYPES:
        raise ConfigError(f"dtype={config.dtype!r} is not served on a CPU: use {' or '.join(CPU_DTYPES)}")
    if device.type != "cpu" and config.quantization is not None:
        raise ConfigError(f"quantization={config.quantization!r} is served on a CPU only: leave it out on a GPU")


def _most_cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """More than what the caches will have, for refusals before weights load."""
    if device.type == "cpu":
        return kv_cache_bytes(config.kv_cache_memory_bytes)
    return gpu.most_cache_bytes(config, device)


def _load_target(config: EngineConfig, path: str, model_config: DecoderConfig, device: torch.device) -> Target:
    started = time.perf_counter()
    tokenizer = load_tokenizer(path, config.tokenizer)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ConfigError(
            f"tokenizer {config.tokenizer or config.model!r} has {tokenizer.vocab_size} ids but the model's vocab_size "
            f"is {model_config.vocab_size}: it is not this model's tokenizer"
        )
    max_positions = config.max_model_len or model_config.max_position_embeddings
    packed = config.dtype == "auto" and device.type == "cpu"
    dtype = torch.float32 if device.type == "cpu" else gpu.model_dtype(config.dtype, path)
    model = load_model(path, dtype, max_positions, packed=packed, quantization=config.quantization, device=device)
    return Target(model_config, model, packed, tokenizer, time.perf_counter() - started)


def _info(
    config: EngineConfig, target: Target, caches: Caches, defaults: dict[str, Any], notes: Sequence[str]
) -> EngineInfo:
    spec = config.speculative_config
    num_blocks = caches.pool.num_target_blocks
    num_tokens = num_blocks * config.block_size
    lines = start_up_lines(
        device="CPU" if target.model.device.type == "cpu" else "GPU",
        load_bytes=target.model.weight_bytes,
        load_time_s=target.load_time_s,
        kv_bytes=caches.num_bytes,
        kv_dtype=str(caches.dtype).removeprefix("torch."),
        num_tokens=num_tokens,
        max_model_len=caches.max_model_len,
    )
    return EngineInfo(
        model=config.model,
        max_model_len=caches.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_cache_tokens=num_tokens,
        vocab_size=target.config.vocab_size,
        dtype=str(target.model.dtype).removeprefix("torch."),
        device=target.model.device.type,
        load_time_s=target.load_time_s,
        speculative_config=spec.resolved() if spec else None,
        num_spec_tokens=spec.num_speculative_tokens if spec else 0,
        spec_methods=spec.method_names if spec else (),
        eos_token_ids=target.eos_token_ids,
        sampling_defaults=defaults,
        log_lines=[*lines, *notes, *(f"WARNING: {warning}" for warning in _warnings(config, target.model))],
    )


def _warnings(config: EngineConfig, model: Decoder) -> list[str]:
    """What works, but not as well as one might expect."""
    warnings = []
    if config.max_num_batched_tokens < config.max_num_seqs:
        warnings.append(
            f"max_num_batched_tokens ({config.max_num_batched_tokens}) is below max_num_seqs ({config.max_num_seqs}): "
            "requests that find no row in a step wait for others to end"
        )
    if model.device.type != "cpu":
        return warnings + gpu.warnings()
    if config.gpu_memory_utilization is not None:
        warnings.append("gpu_memory_utilization is without effect on a CPU: see kv_cache_memory")
    if not native.available():
        warnings.append(
            "the CPU extension is not built (no C++ compiler at install, or a bare source tree): weights are "
            "dequantised to float32 and computed by plain torch, several times slower; see README"
        )
    if not check_row_exactness({linear.shape for linear in model.linears if isinstance(linear, PlainLinear)}):
        warnings.append(
            "this machine's matrix products give a row other bits at other places of a tile: near ties may be decided "
            "differently with and without drafts"
        )
    return warnings


def _size_caches(config: EngineConfig, target: Target, kv_dtype: torch.dtype, proposer: FirstOf) -> Caches:
    block_bytes = attention_spec(target.config, config.block_size).shape.block_bytes(kv_dtype.itemsize)
    beside_bytes = sum(group.block_bytes for group in proposer.groups_beside)
    groups = [GroupSpec("target", block_bytes), *proposer.own_groups]
    if target.model.device.type == "cpu":
        cache_bytes = kv_cache_bytes(config.kv_cache_memory_bytes)
    else:
        cache_bytes = gpu.cache_bytes(config, target.model, kv_dtype, proposer.hidden_taps)
    pool = CachePool(groups, cache_bytes, beside_bytes)
    num_bytes = pool.num_bytes + pool.num_target_blocks * beside_bytes
    max_model_len = _fit(config, target.config, block_bytes + beside_bytes, num_bytes)
    return Caches(pool, num_bytes, kv_dtype, max_model_len)


def _fit(config: EngineConfig, model: DecoderConfig, block_bytes: int, cache_bytes: int) -> int:
    """The longest request that model and cache can serve; refuses one that the user asked for and that does not fit."""
    num_tokens = cache_bytes // block_bytes * config.block_size
    return fit_model_len(
        config.max_model_len, model.max_position_embeddings, num_tokens, block_bytes // config.block_size
    )


def _set_num_threads(count: int | None) -> None:
    """For torch's kernels and for ours."""
    if count is not None:
        torch.set_num_threads(count)
    if native.available():
        native.set_num_threads(torch.get_num_threads())
