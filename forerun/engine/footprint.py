"""What an engine will take of a machine's memory, from its settings and the headers or configs of its models.

`forerun plan` shows it; an engine asks it at start, before weights load, and for what to say where it does not fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from forerun.engine import gpu
from forerun.engine.config import EngineConfig, SettledConfig
from forerun.errors import ConfigError
from forerun.kernels import native
from forerun.memory.budget import GPU_UTILIZATION, MIB, fit_model_len
from forerun.memory.groups import CacheGroups, GroupSpec
from forerun.memory.passes import GRAPH_BYTES, pass_bytes, rope_bytes
from forerun.memory.plan import Machine, Option, Plan, Weights, draft_cache_warning, refusal
from forerun.models.builtin import resolve_model
from forerun.models.config import DecoderConfig
from forerun.models.decoder import attention_spec
from forerun.models.heads.config import HeadConfig
from forerun.models.heads.unserved import NETWORKS
from forerun.models.loading import read_metadata
from forerun.models.paged import KV_DTYPES
from forerun.models.sizes import Form, Sizes, read_head_config, size_decoder, size_head
from forerun.spec.config import MethodConfig, unserved
from forerun.spec.method_rules import HEADS
from forerun.spec.proposers.draft_loading import draft_context, draft_mask
from forerun.spec.proposers.head_loading import head_context_notes
from forerun.spec.refusal import refuse, show

CPU_DTYPES = ("auto", "float32")
PROB_BYTES = 4  # of a draft's probability of a token
HEAD_COPY_BITS = {"fp8": 8.0, "nvfp4": 4.0 + 8 / 16}  # of a weight; nvfp4 has a scale of 8 bits for 16 of them
ROW_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Counted:
    """What is counted and not served: for `forerun plan`, never for an engine.

    Attributes:
        kv_bits, weight_bits: of a value in the cache, of a linear layer's weight; None: as the settings say.
        method: the keys of a method that is not served yet.
        head_copy: `draft_lm_head_quantization`; None: none.
        weights: whether weights that are not here may be fetched; else configs only.
    """

    kv_bits: int | None = None
    weight_bits: float | None = None
    method: Mapping[str, Any] | None = None
    head_copy: str | None = None
    weights: bool = True


NOTHING = Counted()


@dataclass(slots=True)
class Part:
    """What one proposer takes.

    Attributes:
        states: values of the target's hidden states that it is given, a row.
        draft_config: of a draft model, whose passes take activations of their own.
    """

    weights: Weights | None = None
    group: GroupSpec | None = None
    kept: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    num_taps: int = 0
    states: int = 0
    draft_config: DecoderConfig | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """The target, as far as proposers depend on it."""

    path: Path
    sizes: Sizes
    form: Form
    kv_bytes: float  # of a value in the cache
    config: SettledConfig
    counted: Counted

    @property
    def decoder(self) -> DecoderConfig:
        return self.sizes.config

    @property
    def max_model_len(self) -> int:
        """Longest request, as far as is known before the caches are there."""
        return self.config.max_model_len or self.decoder.max_position_embeddings

    def block_bytes(self, decoder: DecoderConfig, element_bytes: float | None = None) -> int:
        """Of a model's block in the cache, in the target's kind of values unless told."""
        values = attention_spec(decoder, self.config.block_size).shape.block_bytes(1)
        return math.ceil(values * (self.kv_bytes if element_bytes is None else element_bytes))

    def resolve(self, model: str | None, revision: str | None) -> Path:
        assert model is not None
        return resolve_model(model, revision=revision, weights=self.counted.weights)


def this_machine(device: torch.device) -> Machine:
    """The machine of a device, as it is now."""
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        return Machine("CPU", int(memory.total), int(memory.available))
    free, total = torch.cuda.mem_get_info(device)
    return Machine("GPU", total, free)


def check_device(config: EngineConfig, on_gpu: bool) -> None:
    """Fail where a device of that kind cannot do what was asked for."""
    if not on_gpu and config.dtype not in CPU_DTYPES:
        raise ConfigError(f"dtype={config.dtype!r} is not served on a CPU: use {' or '.join(CPU_DTYPES)}")
    if on_gpu and config.quantization is not None:
        raise ConfigError(f"quantization={config.quantization!r} is served on a CPU only: leave it out on a GPU")


def weights_form(config: EngineConfig, path: Path, on_gpu: bool) -> Form:
    """How the target's weights are held."""
    dtype = gpu.model_dtype(config.dtype, str(path)) if on_gpu else torch.float32
    return Form(dtype, config.dtype == "auto" and not on_gpu, config.quantization)


def footprint(config: EngineConfig, machine: Machine, counted: Counted = NOTHING) -> Plan:
    """What an engine of these settings takes of the machine.

    Raises:
        ConfigError: as `build_engine`, as far as configs and headers tell.
    """
    on_gpu = machine.device == "GPU"
    config = config.settle(machine.total if on_gpu else None)
    check_device(config, on_gpu)
    path = resolve_model(config.model, weights=counted.weights)
    form = weights_form(config, path, on_gpu)
    sizes = size_decoder(path, form, counted.weight_bits)
    served = Served(path, sizes, form, _kv_bytes(config, sizes, form, counted), config, counted)
    parts = dict(_parts(served))
    groups = [GroupSpec("target", served.block_bytes(sizes.config))]
    groups += [part.group for part in parts.values() if part.group is not None]
    caches = CacheGroups(config.block_size, tuple(groups))
    warnings = [sizes.note] if sizes.note else []
    for name, part in parts.items():
        warnings += [f"{name}: {warning.removeprefix('WARNING: ')}" for warning in part.warnings]
    warnings += [line] if (line := draft_cache_warning(caches)) else []
    return Plan(
        machine=machine,
        utilization=config.gpu_memory_utilization,
        kv_cache_memory=config.kv_cache_memory_bytes,
        target=sizes.weights,
        drafts={name: part.weights for name, part in parts.items() if part.weights is not None},
        caches=caches,
        kept=_kept(served, parts, on_gpu),
        host={name: size for name, part in parts.items() for size in part.host.values()},
        max_model_len=config.max_model_len,
        model_limit=sizes.config.max_position_embeddings,
        max_num_seqs=config.max_num_seqs,
        warnings=tuple(warnings),
    )


def _kv_bytes(config: EngineConfig, sizes: Sizes, form: Form, counted: Counted) -> float:
    if counted.kv_bits is not None:
        return counted.kv_bits / 8
    auto = torch.bfloat16 if sizes.is_packed else form.dtype  # `Decoder.kv_dtype`
    return KV_DTYPES.get(config.kv_cache_dtype, auto).itemsize


def _kept(served: Served, parts: Mapping[str, Part], on_gpu: bool) -> dict[str, int]:
    config, decoder, element_bytes = served.config, served.decoder, served.form.dtype.itemsize
    rows = config.max_num_batched_tokens
    passes = [
        pass_bytes(decoder, rows, gpu.logit_rows(config), element_bytes, sum(part.num_taps for part in parts.values()))
    ]
    drafts = [part.draft_config for part in parts.values() if part.draft_config is not None]
    passes += [pass_bytes(draft, rows, min(rows, config.max_num_seqs), element_bytes) for draft in drafts]
    kept = {"activations": max(passes) + rows * sum(part.states for part in parts.values()) * element_bytes}
    if on_gpu:
        recorded = gpu.draft_shapes(config) if _chains_from_a_head(config) else []
        target_bytes = GRAPH_BYTES * len(gpu.shapes_to_record(config, decoder))
        kept["graphs"] = target_bytes + gpu.draft_graph_bytes(recorded, decoder)
        kept["context"] = gpu.CONTEXT_BYTES
    models = (decoder, *drafts)
    kept["rope tables"] = sum(rope_bytes(model, served.max_model_len, element_bytes) for model in models)
    for part in parts.values():
        for name, size in part.kept.items():
            kept[name] = kept.get(name, 0) + size
    return kept


def _chains_from_a_head(config: EngineConfig) -> bool:
    """Whether drafts are recorded too, as far as the configuration alone tells."""
    methods = config.speculative_config.methods if config.speculative_config else ()
    return len(methods) == 1 and methods[0].method in HEADS and methods[0].spec_tree is None


# -- proposers


def _parts(served: Served) -> Iterator[tuple[str, Part]]:
    """Each proposer under the name that its drafts are counted as."""
    if served.counted.method is not None:
        yield str(served.counted.method["method"]), _unserved(served.counted.method, served)
    spec = served.config.speculative_config
    seen: Counter[str] = Counter()
    for method in spec.methods if spec else ():
        seen[method.method] += 1
        number = f"-{seen[method.method]}" if seen[method.method] > 1 else ""
        yield method.method + number, _part(method, served, method.method + number)


def _part(method: MethodConfig, served: Served, name: str) -> Part:
    if method.method == "draft_model":
        return _draft_model(method, served, name)
    if method.method in HEADS:
        return _head(method, served, name)
    if method.method == "ngram_mod":
        return Part(host={"pool": method.ngram_mod_pool_bytes})
    if method.method == "suffix" and method.suffix_decoding_max_cached_requests:
        return Part(host={"earlier answers": method.suffix_decoding_max_cached_bytes})
    return Part()


def _draft_model(method: MethodConfig, served: Served, name: str) -> Part:
    path = served.resolve(method.model, method.revision)
    sizes = size_decoder(path, dataclasses.replace(served.form, quantization=method.quantization))
    kv_dtype = KV_DTYPES.get(method.kv_cache_dtype or "auto")
    block_bytes = served.block_bytes(sizes.config, None if kv_dtype is None else kv_dtype.itemsize)
    warnings = [sizes.note] if sizes.note else []
    max_len = draft_context(method, sizes.config, served.max_model_len, warnings)
    draft_mask(method, path, sizes.config)
    group = GroupSpec(name, block_bytes, max_len, method.method)
    part = Part(sizes.weights, group, warnings=warnings, draft_config=sizes.config)
    part.kept |= _probabilities(method, served)
    return part


def _head(method: MethodConfig, served: Served, name: str) -> Part:
    path = served.resolve(method.model, method.revision)
    form = dataclasses.replace(served.form, quantization=method.quantization)
    head, weights = size_head(path, served.decoder, form)
    group = GroupSpec(name, served.block_bytes(head.layers), method=method.method, beside_target=True)
    part = Part(weights, group, num_taps=len(head.taps), states=len(head.taps) * head.target_hidden_size)
    part.warnings += head_context_notes(head.max_positions(served.max_model_len), served.max_model_len)
    part.kept |= _probabilities(method, served) | _head_copy(served)
    part.kept["rope tables"] = rope_bytes(head.layers, served.max_model_len, served.form.dtype.itemsize)
    trained = head.num_speculative_tokens
    if trained is not None and method.max_draft_tokens > trained:
        part.warnings.append(_beyond(method.max_draft_tokens, trained, "later ones are guessed worse"))
    return part


def read_head_of(method: MethodConfig, target: DecoderConfig) -> HeadConfig:
    """A head's config without its weights, for `spec.heads.complete`."""
    assert method.model is not None
    return read_head_config(resolve_model(method.model, revision=method.revision, weights=False), target)


def _beyond(asked: int, trained: int, consequence: str) -> str:
    return f"num_speculative_tokens={asked} is more than the {trained} that the checkpoint is made for: {consequence}"


def _probabilities(method: MethodConfig, served: Served) -> dict[str, int]:
    """Of drafts that are drawn: [B, K, V]."""
    if method.draft_sample_method != "probabilistic":
        return {}
    rows = served.config.max_num_seqs * method.max_draft_tokens
    return {"draft probabilities": rows * served.decoder.vocab_size * PROB_BYTES}


def _head_copy(served: Served) -> dict[str, int]:
    """The drafter's own copy of the target's output head, quantised."""
    if (kind := served.counted.head_copy) is None:
        return {}
    num_rows, width = served.decoder.vocab_size, served.decoder.hidden_size
    num_bytes = int(num_rows * width * HEAD_COPY_BITS[kind] / 8) + num_rows * ROW_SCALE_BYTES
    return {f"output head of the drafter ({kind})": num_bytes}


def _unserved(keys: Mapping[str, Any], served: Served) -> Part:
    """A method that is known and not served yet."""
    method = str(keys["method"])
    if method not in NETWORKS:
        refuse(f"method={show(method)} {unserved(method)}")
    model = keys.get("model")
    path = served.path if method == "mtp" and model is None else served.resolve(str(model), keys.get("revision"))
    network = NETWORKS[method](served.decoder, read_metadata(path))
    element_bytes = served.form.dtype.itemsize
    num_bytes = sum(math.prod(shape) for shape in network.shapes.values()) * element_bytes
    group = GroupSpec(method, served.block_bytes(network.layers), method=method, beside_target=True)
    part = Part(Weights(num_bytes), group, warnings=[f"method={show(method)} {unserved(method)}"])
    part.kept |= _head_copy(served)
    k = keys.get("num_speculative_tokens")
    if isinstance(k, int) and network.num_tokens is not None and k > network.num_tokens:
        part.warnings.append(_beyond(k, network.num_tokens, network.beyond))
    return part


# -- where it does not fit


def check_room(config: EngineConfig, machine: Machine) -> Plan:
    """The plan of an engine, which its least weights leave room for.

    Raises:
        ConfigError: they do not; says what is needed, what there is, what would fit, and which option brings how much.
    """
    plan = footprint(config, machine)
    check_fit(config, plan, plan.caches, plan.left(plan.least_weight_bytes))
    return plan


def check_fit(config: EngineConfig, plan: Plan, caches: CacheGroups, cache_bytes: int) -> int:
    """The longest request to serve, where the caches have so many bytes.

    Args:
        caches: as they are; the plan's, until they are known.
    Raises:
        ConfigError: as `check_room`.
    """
    length = fit_model_len(config.max_model_len, plan.model_limit, caches.num_tokens(cache_bytes))
    if length is None:
        raise does_not_fit(config, plan, cache_bytes)
    return length


def does_not_fit(
    config: EngineConfig, plan: Plan, cache_bytes: int, counted: Counted = NOTHING, *, least: bool = True
) -> ConfigError:
    """What to say of caches of so many bytes that do not hold what they must.

    Args:
        least: weights are counted as what they take at least.
    """
    return refusal(plan, cache_bytes, _options(config, plan, cache_bytes, counted, least))


def _options(config: EngineConfig, plan: Plan, cache_bytes: int, counted: Counted, least: bool) -> list[Option]:
    """What else could be asked for, and how much each change brings by itself: computed as the plan itself is."""
    found = []
    num_tokens = min(plan.caches.num_tokens(cache_bytes), plan.model_limit)
    if config.max_model_len is not None and 2 <= num_tokens < config.max_model_len:
        saved = plan.caches.request_bytes(plan.length)[0] - plan.caches.request_bytes(num_tokens)[0]
        found.append(Option(f"--max-model-len {num_tokens}", saved))
    for flag, changed in _changes(config, plan):
        try:
            other = footprint(changed, plan.machine, counted)
        except ConfigError:  # not one that could be served
            continue
        if (gain := _headroom(other, least) - _headroom(plan, least)) > 0:
            found.append(Option(flag, gain))
    return found


def _headroom(plan: Plan, least: bool) -> int:
    """What the caches have beyond a request of the length asked for."""
    weights = plan.least_weight_bytes if least else plan.weight_bytes
    return plan.left(weights, sum(plan.kept.values())) - plan.caches.request_bytes(plan.length)[0]


def _changes(config: EngineConfig, plan: Plan) -> Iterator[tuple[str, EngineConfig]]:
    on_gpu = plan.machine.device == "GPU"
    if KV_DTYPES.get(config.kv_cache_dtype) != torch.bfloat16:
        yield "--kv-cache-dtype bfloat16", dataclasses.replace(config, kv_cache_dtype="bfloat16")
    room = plan.machine.free - plan.least_weight_bytes
    needed = -(-plan.caches.request_bytes(plan.length)[0] // MIB)
    if (config.kv_cache_memory_bytes is not None or not on_gpu) and 0 < needed * MIB <= room:
        more = dataclasses.replace(config, kv_cache_memory_bytes=needed * MIB)
        yield f"--kv-cache-memory {needed}MiB", more
    if on_gpu and config.kv_cache_memory_bytes is None:
        free = plan.machine.free - plan.kept["context"]
        share = math.floor(free / plan.machine.total * 100) / 100
        if share > (config.gpu_memory_utilization or GPU_UTILIZATION):
            yield f"--gpu-memory-utilization {share}", dataclasses.replace(config, gpu_memory_utilization=share)
    if not on_gpu and config.quantization is None and config.dtype == "auto" and native.available():
        yield "--quantization int8", dataclasses.replace(config, quantization="int8")
    if config.speculative_config is not None:
        yield "no draft", dataclasses.replace(config, speculative_config=None)
