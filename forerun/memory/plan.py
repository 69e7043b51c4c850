"""What an engine will take of a machine's memory, before it takes any: for `forerun plan`, and for refusals at start.

No torch here, and nothing is read: `engine/footprint.py` fills a `Plan` in from settings and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.errors import ConfigError
from forerun.memory.budget import (
    GIB,
    MIB,
    GpuMemory,
    fit_model_len,
    gpu_cache_bytes,
    gpu_share,
    kv_cache_bytes,
)
from forerun.memory.groups import CacheGroups

KIB = 2**10
NEARLY_DOUBLE = 0.75  # of the target's KV per token, that a draft's own takes more
SMALLEST_LENGTH = 2  # tokens of a request: one of a prompt, one of an answer


@dataclass(frozen=True, slots=True)
class Weights:
    """Memory of a model's weights.

    Attributes:
        num_bytes: what is counted with.
        otherwise: another figure, which holds in a certain case, in words in `case`; None: there is none.
        held_otherwise: the engine may take that instead of `num_bytes`, and nothing that was read decides.
    """

    num_bytes: int
    otherwise: int | None = None
    case: str = ""
    held_otherwise: bool = False

    @property
    def least(self) -> int:
        """What the engine takes at least."""
        return min(self.num_bytes, self.otherwise) if self.held_otherwise and self.otherwise else self.num_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the engine is to run.

    Attributes:
        device: "CPU" or "GPU".
        total, free: bytes of its memory.
    """

    device: str
    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An engine's memory, in bytes.

    Attributes:
        machine: where it runs.
        utilization: share of a GPU that may be filled; None: the default.
        kv_cache_memory: what was asked for the caches; None: what is left.
        target: its weights. drafts: those of the proposers, by name.
        caches: groups of keys and values.
        kept: on the device beside weights and caches: activations, graphs, tables, by name.
        host: what proposers may keep in main memory, at most, by name.
        max_model_len: what was asked for; None: the model's own, cut to what fits.
        model_limit: positions that the model knows.
        warnings: what one should know, a line each.
    """

    machine: Machine
    utilization: float | None
    kv_cache_memory: int | None
    target: Weights
    drafts: Mapping[str, Weights]
    caches: CacheGroups
    kept: Mapping[str, int]
    host: Mapping[str, int]
    max_model_len: int | None
    model_limit: int
    max_num_seqs: int
    warnings: Sequence[str] = field(default=())

    @property
    def weight_bytes(self) -> int:
        return self.target.num_bytes + sum(draft.num_bytes for draft in self.drafts.values())

    @property
    def least_weight_bytes(self) -> int:
        return self.target.least + sum(draft.least for draft in self.drafts.values())

    @property
    def cache_bytes(self) -> int:
        """What is left for the caches; below 0 where the weights alone are too much."""
        return self.left(self.weight_bytes, sum(self.kept.values()))

    @property
    def cache_bytes_before_activations(self) -> int:
        return self.left(self.weight_bytes)

    def left(self, weights: int, kept: int = 0) -> int:
        """For caches, beside so many bytes of weights and of what else is kept on the device."""
        if self.kv_cache_memory is not None:
            return self.kv_cache_memory
        if self.machine.device == "CPU":
            return kv_cache_bytes(None, self.machine.free - weights)
        memory = GpuMemory(self.machine.total, self.machine.free - weights, kept)
        return gpu_cache_bytes(None, memory, self.utilization)

    def check_asked(self) -> None:
        """Fail where more is asked for the caches than there is beside the weights.

        Raises:
            ConfigError: in the words of the engine.
        """
        free, kept = self.machine.free - self.weight_bytes, sum(self.kept.values())
        if self.kv_cache_memory is not None and self.machine.device == "GPU":
            gpu_cache_bytes(self.kv_cache_memory, GpuMemory(self.machine.total, free, kept), self.utilization)
        elif self.kv_cache_memory is not None:
            kv_cache_bytes(self.kv_cache_memory, free)

    @property
    def length(self) -> int:
        """Of the request that must fit: what was asked for, or the shortest that is of any use."""
        return self.max_model_len or SMALLEST_LENGTH

    @property
    def served_len(self) -> int:
        """Longest request that would be served; 0 where none would."""
        return fit_model_len(self.max_model_len, self.model_limit, self.caches.num_tokens(self.cache_bytes)) or 0

    def batch(self, length: int, cache_bytes: int) -> int:
        """Requests of that length, drafting, that fit at once."""
        return max(0, cache_bytes) // max(1, sum(self.caches.request_bytes(length)))


@dataclass(frozen=True, slots=True)
class Option:
    """A flag to give otherwise, and how much that helps: bytes more for the caches, or fewer that a request needs."""

    flag: str
    gain_bytes: int


def refusal(plan: Plan, cache_bytes: int, options: Sequence[Option]) -> ConfigError:
    """What to say of an engine whose caches, of so many bytes, do not hold what it must serve."""
    caches, length = plan.caches, plan.max_model_len
    needed = caches.request_bytes(plan.length)[0]
    asked = f"max_model_len={length}" if length is not None else "a request of any length"
    return ConfigError(
        f"{asked} needs {size(needed)} of KV cache ({caches.block_bytes / caches.block_size / KIB:g} KiB a token), but "
        f"{_available(plan, cache_bytes)}: {_fits(plan, cache_bytes)}{_helps(options)}"
    )


def _available(plan: Plan, cache_bytes: int) -> str:
    if plan.kv_cache_memory is not None:
        return f"kv_cache_memory holds {size(cache_bytes)}"
    weights = f"{size(plan.weight_bytes)} of weights"
    if plan.machine.device == "CPU":
        return f"{size(cache_bytes)} are available, a quarter of what {weights} leave free"
    share = gpu_share(plan.utilization)
    left = f"{size(cache_bytes)} are" if cache_bytes > 0 else "nothing is"
    return (
        f"{left} available: gpu_memory_utilization={share:g} of {size(plan.machine.total)} is "
        f"{size(plan.machine.total * share)}, and there are {weights} and {size(sum(plan.kept.values()))} for passes"
    )


def _fits(plan: Plan, cache_bytes: int) -> str:
    num_tokens = min(plan.caches.num_tokens(cache_bytes), plan.model_limit)
    if num_tokens < SMALLEST_LENGTH:
        return "no request fits"
    blocks = plan.caches.num_tokens(cache_bytes) // plan.caches.block_size
    batch = min(plan.max_num_seqs, blocks)
    each = min(blocks // batch * plan.caches.block_size, plan.model_limit)
    largest = f"{batch:,} requests of {each:,} tokens each" if batch > 1 else "one request"
    return f"the largest length that fits is {num_tokens:,} tokens, the largest batch {largest}"


def _helps(options: Sequence[Option]) -> str:
    if not options:
        return ""
    return "; what frees memory: " + ", ".join(f"{option.flag} ({size(option.gain_bytes)})" for option in options)


def size(num_bytes: float) -> str:
    """For people: GiB, or MiB where that is less than one."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    return f"{num_bytes / MIB:,.1f} MiB" if abs(num_bytes) >= MIB else f"{num_bytes / KIB:,.1f} KiB"


def draft_cache_warning(caches: CacheGroups) -> str:
    """A line where drafts nearly double what a token takes; "" where they do not."""
    own, extra = caches.groups[0].block_bytes, sum(group.block_bytes for group in caches.groups[1:])
    if extra < NEARLY_DOUBLE * own:
        return ""
    target, draft = (part / caches.block_size / KIB for part in (own, extra))
    return (
        f"the draft's keys and values ({draft:g} KiB a token) nearly double the target's ({target:g} KiB): where all "
        f"requests draft, the cache holds {own / (own + extra):.0%} of the tokens that it holds without"
    )
