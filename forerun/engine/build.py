"""Puts an engine together from its settings: the one place that knows every part."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from forerun.attention import KVShape
from forerun.attention.reference import ReferenceAttention
from forerun.engine.cache import CachePool, GroupSpec
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.messages import EngineInfo
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Scheduler
from forerun.errors import ConfigError
from forerun.kernels import check_row_exactness
from forerun.memory.budget import fit_model_len, kv_cache_bytes, start_up_lines
from forerun.models.builtin import resolve_model
from forerun.models.config import DecoderConfig
from forerun.models.loading import load_model, read_config
from forerun.models.tokenizer import load_tokenizer
from forerun.spec.control import FixedLength
from forerun.spec.registry import make_proposer, make_verifier

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> Engine:
    """Load the model and the tokenizer, size the cache, and connect the parts.

    Raises:
        ConfigError: the settings, the files or the memory do not allow it. Settings are judged before weights load.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    path = str(resolve_model(config.model))
    model_config = read_config(path)
    dtype = torch.float32
    shape = KVShape(model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, config.block_size)
    _fit(config, model_config, shape, dtype, kv_cache_bytes(config.kv_cache_memory_bytes))

    started = time.perf_counter()
    tokenizer = load_tokenizer(path, config.tokenizer)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ConfigError(
            f"tokenizer {config.tokenizer or config.model!r} has {tokenizer.vocab_size} ids but the model's vocab_size "
            f"is {model_config.vocab_size}: it is not this model's tokenizer"
        )
    max_positions = config.max_model_len or model_config.max_position_embeddings
    model = load_model(path, dtype=dtype, max_positions=max_positions)
    load_time_s = time.perf_counter() - started

    pool = CachePool(
        [GroupSpec("target", shape.block_bytes(dtype.itemsize))], kv_cache_bytes(config.kv_cache_memory_bytes)
    )
    max_model_len = _fit(config, model_config, shape, dtype, pool.num_bytes)
    memory = torch.from_numpy(np.zeros(pool.num_bytes, np.uint8))  # zeros that take memory only once they are used
    attention = ReferenceAttention(shape, model_config.num_heads, memory, dtype)
    num_tokens = pool.num_chunks * config.block_size
    lines = start_up_lines(
        load_bytes=model_config.weight_bytes(dtype.itemsize),
        load_time_s=load_time_s,
        kv_bytes=pool.num_bytes,
        num_tokens=num_tokens,
        max_model_len=max_model_len,
    )
    if config.max_num_batched_tokens < config.max_num_seqs:
        lines.append(
            f"WARNING: max_num_batched_tokens ({config.max_num_batched_tokens}) is below max_num_seqs "
            f"({config.max_num_seqs}): requests that find no row in a step wait for others to end"
        )
    if not check_row_exactness(_product_shapes(model_config)):
        lines.append(
            "WARNING: this machine's matrix products give a row other bits at other places of a tile: "
            "near ties may be decided differently with and without drafts"
        )

    spec = config.speculative_config
    proposer = make_proposer(spec)
    num_spec_tokens = spec.num_speculative_tokens if spec else 0
    return Engine(
        runner=Runner(model, attention, config.block_size, proposer.hidden_taps),
        scheduler=Scheduler(
            pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            on_release=proposer.forget,
        ),
        proposer=proposer,
        verifier=make_verifier(spec),
        control=FixedLength(num_spec_tokens),
        tokenizer=tokenizer,
        eos_token_ids={*tokenizer.eos_token_ids, *model_config.eos_token_ids},
        info=EngineInfo(
            model=config.model,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=pool.num_chunks,
            kv_cache_tokens=num_tokens,
            vocab_size=model_config.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device=config.device,
            load_time_s=load_time_s,
            speculative_config=spec.resolved() if spec else None,
            num_spec_tokens=num_spec_tokens,
            log_lines=lines,
        ),
    )


def _fit(config: EngineConfig, model: DecoderConfig, shape: KVShape, dtype: torch.dtype, cache_bytes: int) -> int:
    """The longest request that model and cache can serve; refuses one that the user asked for and that does not fit."""
    block_bytes = shape.block_bytes(dtype.itemsize)
    num_tokens = cache_bytes // block_bytes * config.block_size
    return fit_model_len(
        config.max_model_len, model.max_position_embeddings, num_tokens, block_bytes // config.block_size
    )


def _product_shapes(model: DecoderConfig) -> set[tuple[int, int]]:
    """The distinct (N, K) of the model's weight matrices."""
    return {(shape[0], shape[1]) for shape in model.weight_shapes().values() if len(shape) == 2}
