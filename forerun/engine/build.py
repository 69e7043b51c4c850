"""Puts an engine together from its settings: the one place that knows every part."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.attention import GPU_ROW_TILE
from forerun.attention.slots import BlockTables
from forerun.engine import gpu
from forerun.engine.cache import CachePool
from forerun.engine.config import EngineConfig, SettledConfig
from forerun.engine.device import find_device
from forerun.engine.device_step import DeviceStep
from forerun.engine.engine import Engine
from forerun.engine.footprint import check_device, check_fit, check_room, this_machine, weights_form
from forerun.engine.messages import EngineInfo
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Scheduler
from forerun.engine.slots import Slots
from forerun.errors import ConfigError
from forerun.kernels import check_row_exactness, cuda, native
from forerun.kernels.fused import PlainLinear
from forerun.memory.budget import kv_cache_bytes, start_up_lines
from forerun.memory.groups import CacheGroups, GroupSpec
from forerun.memory.plan import Plan
from forerun.models.builtin import resolve_model
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder, attention_spec
from forerun.models.generation_config import sampling_defaults
from forerun.models.loading import load_model, read_config
from forerun.models.paged import KV_DTYPES, PagedModel, new_memory
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.parsers.formats import ReasoningFormat, reasoning_format
from forerun.sampling.processors import LogitsProcessor
from forerun.sampling.processors.bad_words import BadWords
from forerun.sampling.processors.bias import AllowedTokens, LogitBias
from forerun.sampling.processors.custom import CustomProcessors, RowProcessor, load_processors
from forerun.sampling.processors.minimum import MinTokens
from forerun.sampling.processors.penalties import Penalties
from forerun.sampling.processors.thinking import ThinkingBudget
from forerun.spec.control import make_control
from forerun.spec.heads import complete
from forerun.spec.proposer import Constraint, TargetInfo
from forerun.spec.proposers.first import FirstOf
from forerun.spec.registry import make_proposer, make_verifier
from forerun.spec.rules import LOSSLESS
from forerun.spec.verifiers.synthetic import SyntheticVerifier
from forerun.structured.processor import StructuredProcessor


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
    config = config.settle(device.type != "cpu")
    check_device(config, device.type != "cpu")
    path = str(resolve_model(config.model))
    defaults = sampling_defaults(config.generation_config, path)
    model_config = read_config(path)
    config, head_notes = _complete(config, model_config)
    _check_budget(config, device)
    plan = check_room(config, this_machine(device))
    target = _load_target(config, path, model_config, device)
    if device.type != "cpu":
        gpu.check_rows(target.model)
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, target.model.kv_dtype)
    reasoning = None if config.reasoning_parser is None else reasoning_format(config.reasoning_parser)
    structured = StructuredProcessor(target.tokenizer, set(target.eos_token_ids), reasoning)
    proposer = make_proposer(config.speculative_config, _target_info(config, target, kv_dtype, structured))

    records = device.type != "cpu" and cuda.available() and proposer.serves_slots
    draft_shapes = gpu.draft_shapes(config) if records else []
    caches = _size_caches(config, target, kv_dtype, proposer, plan, draft_shapes)
    memory = new_memory(caches.pool.num_bytes, device)
    proposer.attach_all(memory, caches.pool.num_target_blocks)
    alone = len(caches.pool.groups) == 1
    paged = PagedModel.over(target.model, memory, kv_dtype, config.block_size, alone=alone)
    notes = [*_defaults_note(defaults), *head_notes, *proposer.notes]
    blocks = _block_tables(config, caches, device)
    recording = gpu.Recording(device, gpu.num_graphs(config, target.model) + len(draft_shapes))
    if device.type != "cpu":
        notes.append(f"Attention: {paged.attention.title}")
        paged = gpu.record(paged, config, blocks[0], proposer.hidden_taps)
    device_step, why_not = _device_step(config, paged, blocks, proposer)
    if device_step is not None:
        proposer.attach_slots(device_step.slots, draft_shapes)
    notes = [*recording.lines(), *notes]
    if why_not:
        notes.append(f"Each step waits for the one before: {why_not}")
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
        processors=_processors(target, custom, reasoning, structured),
        tokenizer=target.tokenizer,
        eos_token_ids=target.eos_token_ids,
        info=_info(config, target, caches, defaults, notes),
        device_step=device_step,
    )


def _block_tables(config: SettledConfig, caches: Caches, device: torch.device) -> list[BlockTables]:
    """Of each group, for what a request may ever hold, and room for a pass that the host lays out."""
    longest = caches.max_model_len + 2 * gpu.most_rows_a_request(config)  # drafts may begin at the last position
    num_blocks = -(-longest // config.block_size)
    most_rows = config.max_num_seqs * GPU_ROW_TILE
    spare = config.max_num_seqs * (num_blocks + 3 * GPU_ROW_TILE) if device.type != "cpu" else 0
    return [
        BlockTables.new(config.max_num_seqs, num_blocks, device, most_rows=most_rows, spare=spare)
        for _ in caches.pool.groups
    ]


def _device_step(
    config: SettledConfig, paged: PagedModel, blocks: Sequence[BlockTables], proposer: FirstOf
) -> tuple[DeviceStep | None, str]:
    """What launches steps whose verdict the host need not wait for; or None, and why not where a user might ask."""
    spec = config.speculative_config
    rule = spec.rejection_sample_method if spec else "match"
    wanted = config.async_scheduling
    if wanted is None:
        wanted = cuda.serves(blocks[0].ints)
    if not wanted:
        return None, ""
    if rule not in ("match", "synthetic"):
        return None, f"rejection_sample_method={rule!r} is judged by the host"
    if not proposer.serves_slots:
        return None, f"{proposer.name} drafts on the host, from tokens that it has seen"
    num_drafted = spec.num_speculative_tokens if spec else 0
    slots = Slots(blocks, config.block_size, num_drafted)
    rates = None
    if spec is not None and rule == "synthetic":
        conditional = SyntheticVerifier.from_config(spec).conditional
        rates = torch.tensor(conditional, dtype=torch.float64, device=blocks[0].ints.device)
    drafts = proposer if proposer.members else None
    return DeviceStep(paged, slots, rule, proposer.hidden_taps, drafts, rates), ""


def _processors(
    target: Target,
    custom: Sequence[RowProcessor],
    reasoning: ReasoningFormat | None,
    structured: StructuredProcessor,
) -> list[LogitsProcessor]:
    """In the order in which they change logits: vLLM's, but that what is forced and forms come last."""
    return [
        LogitBias(),
        AllowedTokens(),
        BadWords(target.tokenizer),
        MinTokens(),
        CustomProcessors(custom),
        Penalties(),
        ThinkingBudget(target.tokenizer, reasoning),
        structured,
    ]


def _defaults_note(defaults: Mapping[str, Any]) -> list[str]:
    if not defaults:
        return []
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return [f"Sampling values where a request gives none: {values} (--generation-config vllm: without them)"]


def _complete(config: SettledConfig, target: DecoderConfig) -> tuple[SettledConfig, Sequence[str]]:
    """The settings with what the headers of draft heads say, and lines for the log."""
    if config.speculative_config is None:
        return config, ()
    speculative_config, notes = complete(config.speculative_config, target)
    return dataclasses.replace(config, speculative_config=speculative_config), notes


def _target_info(config: SettledConfig, target: Target, kv_dtype: torch.dtype, constraint: Constraint) -> TargetInfo:
    return TargetInfo(
        name=config.model,
        model=target.model,
        tokenizer=target.tokenizer,
        max_model_len=config.max_model_len or target.config.max_position_embeddings,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_dtype=kv_dtype,
        packed=target.packed,
        constraint=constraint,
    )


def _check_budget(config: SettledConfig, device: torch.device) -> None:
    """Fail, before weights load, where more is asked for than there is."""
    if device.type == "cpu":
        kv_cache_bytes(config.kv_cache_memory_bytes)
    else:
        gpu.check_kernels(config)
        gpu.check_budget(config, device)


def _load_target(config: SettledConfig, path: str, model_config: DecoderConfig, device: torch.device) -> Target:
    started = time.perf_counter()
    tokenizer = load_tokenizer(path, config.tokenizer)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ConfigError(
            f"tokenizer {config.tokenizer or config.model!r} has {tokenizer.vocab_size} ids but the model's vocab_size "
            f"is {model_config.vocab_size}: it is not this model's tokenizer"
        )
    max_positions = config.max_model_len or model_config.max_position_embeddings
    form = weights_form(config, Path(path), device.type != "cpu")
    model = load_model(
        path,
        form.dtype,
        max_positions,
        packed=form.packed,
        quantization=form.quantization,
        device=device,
        invariant=config.batch_invariant,
    )
    return Target(model_config, model, form.packed, tokenizer, time.perf_counter() - started)


def _info(
    config: SettledConfig, target: Target, caches: Caches, defaults: dict[str, Any], notes: Sequence[str]
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
        rejection_sample_method=spec.rejection_sample_method if spec else "match",
        exact_rows=target.model.device.type == "cpu" or target.model.invariant,
        lossless=LOSSLESS[spec.rejection_sample_method] if spec else LOSSLESS["match"],
        log_lines=[*lines, *notes, *(f"WARNING: {warning}" for warning in _warnings(config, target.model))],
    )


def _warnings(config: SettledConfig, model: Decoder) -> list[str]:
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


def _size_caches(
    config: SettledConfig,
    target: Target,
    kv_dtype: torch.dtype,
    proposer: FirstOf,
    plan: Plan,
    draft_shapes: Sequence[tuple[int, int]],
) -> Caches:
    block_bytes = attention_spec(target.config, config.block_size).shape.block_bytes(kv_dtype.itemsize)
    groups = CacheGroups(
        config.block_size, (GroupSpec("target", block_bytes), *proposer.own_groups, *proposer.groups_beside)
    )
    if target.model.device.type == "cpu":
        cache_bytes = kv_cache_bytes(config.kv_cache_memory_bytes)
    else:
        cache_bytes = gpu.cache_bytes(config, target.model, kv_dtype, proposer.hidden_taps, draft_shapes)
    max_model_len = check_fit(config, plan, groups, cache_bytes)
    pool = CachePool(groups.own, cache_bytes, groups.beside_bytes)
    num_bytes = pool.num_bytes + pool.num_target_blocks * groups.beside_bytes
    return Caches(pool, num_bytes, kv_dtype, max_model_len)


def _set_num_threads(count: int | None) -> None:
    """For torch's kernels and for ours."""
    if count is not None:
        torch.set_num_threads(count)
    if native.available():
        native.set_num_threads(torch.get_num_threads())
