"""`forerun plan`: what a server would take of a machine's memory, for plain decoding and each proposer side by side.

Config files are enough: no weights are read or fetched, and no GPU is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from forerun.cli.serve import parse_bytes, parse_count
from forerun.errors import ConfigError
from forerun.memory.budget import DEFAULT_SHARE, MIB
from forerun.memory.cards import find_card
from forerun.memory.plan import KIB, Machine, Plan, Weights, size
from forerun.spec.config import SpeculativeConfig, known_keys
from forerun.spec.keys import KEYS, METHOD_ALIASES, METHODS, Status
from forerun.spec.method_rules import HEADS
from forerun.spec.roles import assign_roles
from forerun.spec.source import FLAG, read_object

if TYPE_CHECKING:  # torch comes with them, and the options are judged first
    from forerun.engine.config import EngineConfig
    from forerun.engine.footprint import Counted

PLAIN = "none"
KV_BITS = {"fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8}  # planned for, not served
WEIGHT_BITS = {"fp8": 8, "int4": 4, "nvfp4": 4}  # the same
CONTEXTS = (2048, 8192, 32768)
MOST_COLUMNS = 1000  # of a terminal

# fmt: off


def plan(
    model: Annotated[str, typer.Argument(
        help="A directory with config.json, a .gguf file, an id of the hub or a built-in name.")],
    speculative_config: Annotated[list[str] | None, typer.Option(
        FLAG, "-sc", metavar="JSON", help="How to draft, as for `serve`; may be repeated, a column each.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A card by name, such as L40S; else this machine.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(
        help="Memory of the card: 46068MiB, 80GiB.", metavar="BYTES")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(
        help="Share of the GPU's memory that the engine may fill; if not given, 0.92.")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(
        "--kv-cache-memory", "--kv-cache-memory-bytes", metavar="BYTES", help="Memory for KV blocks, as for `serve`.")
        ] = None,
    max_model_len: Annotated[str | None, typer.Option(
        metavar="TOKENS", help="Longest prompt plus output: 4096, 4k, 4K or auto.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(
        help="Most requests in one step; if not given, 64, on a GPU 256.")] = None,
    max_num_batched_tokens: Annotated[str | None, typer.Option(
        metavar="TOKENS", help="Most tokens in one step; if not given, 512, on a GPU 2048 or 8192.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16; fp8 is counted only.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32; on a GPU also bfloat16 and float16.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8; fp8 and int4 are counted only.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a server would take of memory: weights, keys and values, buffers, and how many tokens then fit.

    From configs alone: no weights, no GPU. Each --speculative-config is a column beside plain decoding.
    """
    # fmt: on
    from forerun.engine.config import EngineConfig

    notes: list[str] = []
    machine = _machine(gpu, gpu_memory, notes)
    config = EngineConfig(
        model=model,
        device="cuda" if machine.device == "GPU" else "cpu",
        dtype=dtype,
        quantization=_served("quantization", quantization, WEIGHT_BITS, notes),
        max_model_len=parse_count("--max-model-len", max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=parse_count("--max-num-batched-tokens", max_num_batched_tokens),
        kv_cache_memory_bytes=parse_bytes("--kv-cache-memory", kv_cache_memory),
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=_served("kv_cache_dtype", kv_cache_dtype, KV_BITS, notes) or "auto",
        block_size=block_size,
    )
    bits = {"kv_bits": KV_BITS.get(kv_cache_dtype), "weight_bits": WEIGHT_BITS.get(quantization or "")}
    columns = _columns(config, speculative_config or [], bits, notes)
    plans = {column.name: _plan_of(column, machine) for column in columns}
    if as_json:
        report = {name: _as_json(each) for name, each in plans.items()}
        typer.echo(json.dumps({"model": model, "machine": asdict(machine), "notes": notes, "plans": report}, indent=2))
    else:
        _print(Console(), model, machine, plans, notes)
    if not any(isinstance(each, Plan) and each.served_len for each in plans.values()):
        raise typer.Exit(1)


def _machine(gpu: str | None, gpu_memory: str | None, notes: list[str]) -> Machine:
    """A card that is told of, or what this machine has."""
    from forerun.engine.device import capability_obstacle, find_device
    from forerun.engine.footprint import this_machine

    if gpu is not None and gpu_memory is not None:
        raise ConfigError(f"--gpu {gpu!r} and --gpu-memory {gpu_memory!r} exclude each other: give one of them")
    if gpu is not None:
        card = find_card(gpu)
        obstacle = f"{card.name} is no NVIDIA GPU"
        if card.capability is not None:
            obstacle = capability_obstacle(card.name, card.capability) or ""
        notes += [f"{obstacle}: it is counted all the same"] if obstacle else []
        return Machine("GPU", card.mib * MIB, card.mib * MIB)
    if (total := parse_bytes("--gpu-memory", gpu_memory)) is not None:
        return Machine("GPU", total, total)
    return this_machine(find_device("auto")[0])


def _served(name: str, value: str | None, counted: Mapping[str, float], notes: list[str]) -> str | None:
    """The value for the engine's settings; one that is only counted is left out there, with the engine's own words."""
    if value not in counted:
        return value
    from forerun.engine.config import EngineConfig

    try:
        settings: dict[str, Any] = {"model": "", name: value}
        EngineConfig(**settings)
    except ConfigError as error:
        notes.append(f"{error}; it is counted all the same")
    return None


@dataclass(frozen=True, slots=True)
class Column:
    """What one column of the report is planned from."""

    name: str
    config: EngineConfig
    counted: Counted


def _columns(config: EngineConfig, sources: list[str], bits: Mapping[str, Any], notes: list[str]) -> list[Column]:
    """Plain decoding, then each configuration under the names of its methods."""
    from forerun.engine.footprint import Counted

    plain = Counted(weights=False, **bits)
    roles = assign_roles(config.model, None)
    asked: Sequence[str | Mapping[str, Any]] = sources or ([] if roles.source is None else [{}])
    drafting = [_column(config, source, plain, notes) for source in asked]
    columns = [Column(PLAIN, replace(config, model=roles.target), plain)]
    for column in drafting:
        same = sum(other.name.partition(" #")[0] == column.name for other in columns)
        columns.append(replace(column, name=f"{column.name} #{same + 1}") if same else column)
    return columns


def _column(config: EngineConfig, source: str | Mapping[str, Any], plain: Counted, notes: list[str]) -> Column:
    """One configuration. A method that is known and not served is planned for too, where its network is known."""
    given = known_keys(read_object(source))
    method = given.get("method")
    name = METHOD_ALIASES.get(method, method) if isinstance(method, str) else None
    if name in METHODS and METHODS[name].status is Status.NOT_YET:
        counted = replace(plain, method=given | {"method": name}, head_copy=_head_copy(given))
        return Column(name, config, counted)
    roles = assign_roles(config.model, given)
    spec = SpeculativeConfig.parse(roles.source)
    notes += [*([roles.note] if roles.note else []), *spec.warnings]
    own = replace(config, model=roles.target, speculative_config=spec)
    return Column(", ".join(spec.method_names), own, replace(plain, head_copy=_head_copy(given)))


def _head_copy(given: Mapping[str, Any]) -> str | None:
    """What is known to have no effect yet, and is counted here."""
    value = given.get("draft_lm_head_quantization")
    return None if value is None else str(KEYS["draft_lm_head_quantization"].check(value))


def _plan_of(column: Column, machine: Machine) -> Plan | ConfigError:
    """The plan, or why a server would refuse the configuration."""
    from forerun.engine.footprint import does_not_fit, footprint, read_head_of
    from forerun.models.builtin import resolve_model
    from forerun.models.loading import read_config
    from forerun.spec.heads import complete

    config = column.config
    notes: Sequence[str] = ()
    try:
        if (spec := config.speculative_config) is not None and not set(spec.method_names).isdisjoint(HEADS):
            target = read_config(resolve_model(config.model, weights=False))
            completed, notes = complete(spec, target, read_head_of)
            config = replace(config, speculative_config=completed)
        notes = [*notes, *_tokenizer_notes(config)]
        made = footprint(config, machine, column.counted)
        made.check_asked()
        refusals = []
        if not made.served_len:
            refusals = [does_not_fit(config, made, made.cache_bytes, column.counted, least=False)]
    except ConfigError as error:
        return error
    said = [note.removeprefix("WARNING: ") for note in notes]
    return replace(made, warnings=(*said, *made.warnings, *(f"does not fit: {refusal}" for refusal in refusals)))


def _tokenizer_notes(config: EngineConfig) -> list[str]:
    """What there is to say of draft models' tokenizers, where all of them lie here.

    Raises:
        ConfigError: one that the engine would refuse.
    """
    from forerun.models.builtin import resolve_model
    from forerun.models.tokenizer import load_tokenizer
    from forerun.spec.vocabulary import check_same_tokenizer

    notes: list[str] = []
    for method in config.speculative_config.methods if config.speculative_config else ():
        if method.method != "draft_model" or method.use_heterogeneous_vocab:
            continue
        paths = [resolve_model(name, weights=False) for name in (config.model, str(method.model))]
        if all(path.is_file() or (path / "tokenizer.json").exists() for path in paths):
            target, draft = (load_tokenizer(str(path)) for path in paths)
            notes += check_same_tokenizer(target, draft, str(method.model))
    return notes


# -- what is printed


def _print(
    console: Console, model: str, machine: Machine, plans: Mapping[str, Plan | ConfigError], notes: list[str]
) -> None:
    made = {name: each for name, each in plans.items() if isinstance(each, Plan)}
    if made:
        table = Table(box=SIMPLE, pad_edge=False)
        table.add_column(no_wrap=True)
        for name in made:
            table.add_column(escape(name), justify="right", no_wrap=True)
        for title, row in _rows(next(iter(made.values())), made):
            table.add_row(title, *row)
        console.print(f"{model} on {_machine_words(machine)}", markup=False, highlight=False, soft_wrap=True)
        whole = Measurement.get(console, console.options.update(max_width=MOST_COLUMNS), table).maximum
        Console(width=max(console.width, whole)).print(table)  # figures are not cut, however narrow the terminal
    for line in _lines(plans, notes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _machine_words(machine: Machine) -> str:
    what = "a GPU with" if machine.device == "GPU" else "a CPU with"
    return f"{what} {machine.total / MIB:,.0f} MiB, {machine.free / MIB:,.0f} MiB of it free"


def _rows(first: Plan, plans: Mapping[str, Plan]) -> Iterator[tuple[str, list[str]]]:
    """Title and a cell for each plan."""

    def row(title: str, cell: Callable[[Plan], str]) -> tuple[str, list[str]]:
        return title, [cell(each) for each in plans.values()]

    yield row("weights of the target", lambda p: _weights([p.target]))
    yield row("weights of the proposer", lambda p: _weights(list(p.drafts.values())))
    yield row("KV a token", _token_words)
    if first.machine.device == "GPU":  # on a CPU they do not count
        yield row("left for KV, before activations", lambda p: size(p.cache_bytes_before_activations))
        yield row("  tokens that fit", lambda p: _tokens(p, p.cache_bytes_before_activations))
    for name in dict.fromkeys(name for each in plans.values() for name in each.kept):
        yield row(name, lambda p, name=name: size(p.kept[name]) if name in p.kept else "")  # type: ignore[misc]
    yield row("left for KV", lambda p: size(p.cache_bytes))
    yield row("  tokens that fit", lambda p: _tokens(p, p.cache_bytes))
    for length in _lengths(first):
        yield row(f"  requests of {length:,}", lambda p, n=length: f"{p.batch(n, p.cache_bytes):,}")  # type: ignore[misc]
    for length in _lengths(first):
        yield row(f"a request of {length:,}", lambda p, n=length: _request_words(p, n))  # type: ignore[misc]
    if any(each.host for each in plans.values()):
        yield row("main memory, at most", lambda p: size(sum(p.host.values())) if p.host else "")


def _lengths(first: Plan) -> list[int]:
    """Contexts to show: some usual ones, and the longest that is asked for or that the model knows."""
    longest = first.max_model_len or first.model_limit
    return sorted({longest, *(length for length in CONTEXTS if length < longest)})


def _weights(parts: Sequence[Weights]) -> str:
    if not parts:
        return "none"
    other = f" ({_gigabytes(_otherwise(parts))})" if any(part.otherwise is not None for part in parts) else ""
    return _gigabytes(sum(part.num_bytes for part in parts)) + other


def _otherwise(parts: Iterable[Weights]) -> int:
    """Of all parts, where each takes its other figure."""
    return sum(part.num_bytes if part.otherwise is None else part.otherwise for part in parts)


def _gigabytes(num_bytes: int) -> str:
    """As checkpoints are spoken of."""
    return f"{num_bytes / 1e9:,.2f} GB"


def _token_words(plan: Plan) -> str:
    parts = [f"{group.block_bytes / plan.caches.block_size / KIB:g}" for group in plan.caches.groups]
    return f"{' + '.join(parts)} KiB"


def _tokens(plan: Plan, cache_bytes: int) -> str:
    """Where all requests draft; in brackets with the other figure of the proposer's weights."""
    tokens = f"{plan.caches.num_drafting_tokens(cache_bytes):,}"
    other = _tokens_otherwise(plan, cache_bytes)
    return tokens if other is None else f"{tokens} ({other:,})"


def _tokens_otherwise(plan: Plan, cache_bytes: int) -> int | None:
    drafts = plan.drafts.values()
    if plan.kv_cache_memory is not None or all(draft.otherwise is None for draft in drafts):
        return None
    saved = sum(draft.num_bytes for draft in drafts) - _otherwise(drafts)
    share = 1.0 if plan.machine.device == "GPU" else DEFAULT_SHARE
    return plan.caches.num_drafting_tokens(cache_bytes + int(saved * share))


def _request_words(plan: Plan, length: int) -> str:
    target, draft = plan.caches.request_bytes(length)
    return f"{size(target)} + {size(draft)}" if draft else size(target)


def _lines(plans: Mapping[str, Plan | ConfigError], notes: list[str]) -> Iterator[str]:
    """What one should know, below the table."""
    yield from (f"note: {note}" for note in notes)
    for name, each in plans.items():
        if isinstance(each, ConfigError):
            yield f"{name}: refused: {each}"
            continue
        if name == PLAIN and each.target.otherwise is not None:
            yield f"target: {_both(each.target)}"
        yield from (f"{draft}: {_both(weights)}" for draft, weights in each.drafts.items() if weights.otherwise)
        yield from (f"warning: {name}: {warning}" for warning in each.warnings)


def _both(weights: Weights) -> str:
    assert weights.otherwise is not None
    return f"{_gigabytes(weights.num_bytes)} of weights, or in brackets {_gigabytes(weights.otherwise)} {weights.case}"


def _as_json(plan: Plan | ConfigError) -> dict[str, Any]:
    if isinstance(plan, ConfigError):
        return {"refused": str(plan)}
    caches = plan.caches
    return {
        "weights": {"target": asdict(plan.target)} | {name: asdict(draft) for name, draft in plan.drafts.items()},
        "kv_bytes_per_token": {group.name: group.block_bytes // caches.block_size for group in caches.groups},
        "kept_bytes": dict(plan.kept),
        "main_memory_bytes": dict(plan.host),
        "kv_cache_bytes": plan.cache_bytes,
        "kv_cache_bytes_before_activations": plan.cache_bytes_before_activations,
        "tokens": caches.num_drafting_tokens(plan.cache_bytes),
        "tokens_before_activations": caches.num_drafting_tokens(plan.cache_bytes_before_activations),
        "tokens_before_activations_otherwise": _tokens_otherwise(plan, plan.cache_bytes_before_activations),
        "tokens_without_drafts": caches.num_tokens(plan.cache_bytes),
        "max_model_len": plan.served_len,
        "batch": {str(length): plan.batch(length, plan.cache_bytes) for length in _lengths(plan)},
        "request_bytes": {
            str(length): dict(zip(("target", "draft"), caches.request_bytes(length), strict=True))
            for length in _lengths(plan)
        },
        "warnings": list(plan.warnings),
    }
