"""Checkpoints to decoders: directories in Hugging Face's layout (safetensors) and GGUF files.

The whole header is checked (names, shapes, kinds, sizes) before memory is taken; tensors are then converted one by one
into their place in our fused tensors, so that no second copy of the model is ever held. Pickles are not read.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import CheckpointError, ConfigError
from forerun.kernels import native
from forerun.kernels.packed import FLOATING, PackedLinear, PackedWeight, packed_kind
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.families import GGUF_FAMILIES, family_of
from forerun.models.families.base import ROPE_FACTORS, Family, GgufHeader, Slot
from forerun.models.families.values import Values
from forerun.models.gguf_file import GgufFile, can_dequantize, row_chunks
from forerun.models.layers import Weight, activation_terms

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 64 << 20
MAX_MESSAGE = 1000
CPU = torch.device("cpu")
CHUNK_ELEMENTS = 1 << 18  # dequantised at once: small enough to stay in a core's cache
DEFAULT_MAX_POSITIONS = 1 << 17
SAFETENSORS_KINDS = ("F32", "F16", "BF16")
MAX_ROPE_FACTORS = 1 << 16
MAX_MATRICES = 1 << 14  # of a tensor of three axes

Fill = Callable[[Tensor], None]
"""Writes a checkpoint's tensor, rows in the checkpoint's order, into a tensor of its shape."""

Pack = Callable[[PackedWeight, int, Tensor | None], None]
"""Writes a checkpoint's matrix into a packed weight, from a row of it on; its rows in an order [N], or in their own."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a checkpoint, not read yet.

    Attributes:
        where: the file and the tensor's name there.
        kind: the packed kind that keeps its values exactly; None: only float32 does.
    """

    shape: tuple[int, ...]
    fill: Fill
    pack: Pack
    where: str
    kind: str | None


class Stored(Protocol):
    """What of a tensor decides how it is held in memory: see `Source`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str | None: ...


AnySource = TypeVar("AnySource", bound=Stored)
KindFor = Callable[[Stored], str | None]
Part = tuple[AnySource, Slot]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose header has been read.

    Attributes:
        slots: the tensors it must have, and where they go.
        layer_prefix: how the names of a layer's tensors begin.
        sources: opens the tensors that it has; the dictionary is valid as long as the checkpoint is.
        ignored: names that may be there and carry nothing that we need.
    """

    path: Path
    config: DecoderConfig
    slots: Mapping[str, Slot]
    layer_prefix: str
    sources: Callable[[], dict[str, Source]]
    ignored: re.Pattern[str]


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
    *,
    packed: bool = False,
    quantization: str | None = None,
    device: torch.device = CPU,
    invariant: bool = False,
) -> Decoder:
    """Load a decoder.

    Args:
        path: a directory with config.json and *.safetensors, or a .gguf file.
        dtype: of the weights in memory and of the computation.
        max_positions: longest sequence to be computed; None: the config's, at most DEFAULT_MAX_POSITIONS.
        packed: keep quantised and bf16 matrices as they are and compute with the CPU extension, where that is there;
            others become plain float32. Needs dtype float32.
        quantization: "int8" makes int8 of the matrices of floating kinds too, and of those that have no packed kind.
        device: where the weights lie and the model runs; packed ones on a CPU only.
        invariant: see `Decoder`.
    Raises:
        CheckpointError: missing, broken or unsupported; one line that names the file and the tensor.
        ConfigError: a quantization that we do not know, or that lacks the CPU extension.
    """
    choose = kind_for(packed, quantization)
    assert choose is None or (dtype == torch.float32 and device.type == "cpu")
    path = Path(path)
    with one_line_errors(path):
        checkpoint = open_checkpoint(path)
        weights = _load_weights(checkpoint, dtype, choose, device)
    limit = min(checkpoint.config.max_position_embeddings, DEFAULT_MAX_POSITIONS)
    return Decoder(checkpoint.config, weights, max_positions or limit, invariant=invariant)


def kind_for(packed: bool, quantization: str | None) -> KindFor | None:
    """Which packed kind a matrix takes, None for plain; None for no packing at all."""
    if quantization not in (None, "int8"):
        raise ConfigError(f"quantization={quantization!r} is not supported: use 'int8' or nothing")
    if quantization == "int8":
        if not native.available():
            raise ConfigError("quantization='int8' needs the CPU extension, which is not built: see docs")
        return lambda source: "q8_0" if source.kind in (None, "bf16") else source.kind
    return (lambda source: source.kind) if packed and native.available() else None


def read_config(path: str | Path) -> DecoderConfig:
    """What `load_model` would load, from config.json or the GGUF header alone.

    Raises:
        CheckpointError: as `load_model`.
    """
    path = Path(path)
    with one_line_errors(path):
        return open_checkpoint(path).config


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What config.json or the GGUF header says, as it stands: for keys that are not the decoder's.

    Raises:
        CheckpointError: as `load_model`.
    """
    path = Path(path)
    with one_line_errors(path):
        return read_json(path / "config.json") if path.is_dir() else dict(GgufFile(path).metadata)


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Errors of libraries and of the system as CheckpointErrors that name the file; all in one printable line."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(_printable(str(error))) from None
    except OSError as error:
        raise CheckpointError(_printable(f"{error.filename or path}: {error.strerror or error}")) from None
    except SafetensorError as error:
        raise CheckpointError(_printable(f"{path}: broken safetensors file: {_one_line(error)}")) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _printable(message: str) -> str:
    """Names come from files: a line feed or an escape code in one must not reach a terminal or a log."""
    shown = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def open_checkpoint(path: Path, without: Sequence[str] = ()) -> Checkpoint:
    """Read the header of a checkpoint.

    Args:
        without: keys of config.json to be taken as missing: for who counts what cannot be served.
    Raises:
        CheckpointError: as `load_model`, which refuses the keys of `without`.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return _open_directory(path, without)
    if not path.exists():
        raise CheckpointError(_no_such_model(str(path)))
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a directory nor a regular file")
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise CheckpointError(f"{path} is a pickle, which can run code when it is read: convert it to safetensors")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: pass the directory that holds it and config.json")
    return _open_gguf(path)


def _no_such_model(name: str) -> str:
    missing = f"{name}: no such file or directory"
    try:
        from forerun.models.builtin import BUILTIN_MODELS
    except ImportError:
        return missing
    if name in BUILTIN_MODELS:
        return f"{missing}; it is a built-in model that has not been fetched"
    close = difflib.get_close_matches(name.lower(), BUILTIN_MODELS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{missing}, and no built-in model ({', '.join(BUILTIN_MODELS)}){hint}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A config's errors say what is wrong; this adds where."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


# Hugging Face layout


def _open_directory(path: Path, without: Sequence[str]) -> Checkpoint:
    config_path = path / "config.json"
    if not config_path.exists():
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; pass the GGUF file itself: {path / ggufs[0]}" if ggufs else ""
        raise CheckpointError(f"{path} has no config.json{hint}")
    values = Values({key: value for key, value in read_json(config_path).items() if key not in without})
    with naming(config_path):
        family = family_of(values.text("model_type"), "model_type")
        config = family.read_hf(values)
    config = _with_generation_config(config, path / "generation_config.json")
    ignored = [r"rotary_emb\.inv_freq$"]
    ignored += [r"^lm_head\.weight$"] if config.tie_word_embeddings else []
    ignored += [family.hf_ignored] if family.hf_ignored else []
    return Checkpoint(
        path,
        config,
        family.hf_slots(config),
        "layers.",
        lambda: safetensors_sources(path, family.hf_prefixes),
        re.compile("|".join(ignored)),
    )


def _with_generation_config(config: DecoderConfig, path: Path) -> DecoderConfig:
    """Chat models often name further end tokens there only."""
    if not path.exists():
        return config
    values = Values(read_json(path))
    with naming(path):
        ids = (*config.eos_token_ids, *values.token_ids("eos_token_id"))
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(ids)))


def read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def safetensors_sources(path: Path, prefixes: Sequence[str] = ("model.",)) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for file in safetensors_files(path):
        for name, source in _file_sources(file).items():
            short = name.removeprefix(next(filter(name.startswith, prefixes), ""))
            if short in sources:
                raise CheckpointError(f"{source.where}: the tensor stands there twice, also in {sources[short].where}")
            sources[short] = source
    return sources


def safetensors_files(path: Path) -> list[Path]:
    """One file, or the shards that the index names, or whatever there is."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        return [path / name for name in shard_names(index)]
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for p in path.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{path} holds pickles only ({pickles[0]}), which can run code when they are read: convert to safetensors"
        )
    raise CheckpointError(f"{path} has no *.safetensors file")


def shard_names(index: Path) -> list[str]:
    with naming(index):
        names = Values(read_json(index)).mapping("weight_map").values()
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
            raise CheckpointError(f"{index}: weight_map must name files in its own directory, got {name!r}")
    if not names:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    return sorted(set(names))


def _file_sources(file: Path) -> dict[str, Source]:
    """The tensors of one safetensors file. The library checks that header and size of the file agree."""
    try:
        opened: Any = safe_open(file, framework="pt")
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: broken safetensors file: {_one_line(error)}") from None
    sources = {}
    for name, part in parts.items():
        sources[name] = _safetensors_source(opened, name, tuple(part.get_shape()), part.get_dtype(), f"{file}: {name}")
    return sources


def _safetensors_source(opened: Any, name: str, shape: tuple[int, ...], kind: str, where: str) -> Source:
    def read() -> Tensor:
        if kind not in SAFETENSORS_KINDS:
            raise CheckpointError(f"{where} is of kind {kind}, supported: {', '.join(SAFETENSORS_KINDS)}")
        tensor: Tensor = opened.get_tensor(name)
        return tensor

    def fill(target: Tensor) -> None:
        target.copy_(read())

    def pack(weight: PackedWeight, first_row: int, order: Tensor | None) -> None:
        weight.fill_floats(read(), first_row, order)

    return Source(shape, fill, pack, where, "bf16" if kind == "BF16" else None)


# GGUF


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    with naming(path):
        family, config = _gguf_config(file)
    ignored = re.compile("|".join(rf"^{re.escape(name)}$" for name in ROPE_FACTORS))
    return Checkpoint(path, config, family.gguf_slots(config), "blk.", lambda: gguf_sources(file), ignored)


def _gguf_config(file: GgufFile) -> tuple[Family, DecoderConfig]:
    general = Values(file.metadata)
    name = general.text("general.architecture")
    family = family_of(name, "general.architecture", GGUF_FAMILIES)
    if general.integer("split.count", 1) > 1:
        raise CheckpointError("split GGUF files are not supported: merge the parts with llama.cpp's gguf-split")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    if "token_embd.weight" not in shapes:
        raise CheckpointError("tensor 'token_embd.weight' is missing")
    return family, family.read_gguf(GgufHeader(general, Values(file.metadata, f"{name}."), shapes, rope_factors(file)))


def rope_factors(file: GgufFile) -> dict[str, tuple[float, ...]]:
    """The small tensors that rope is scaled by, as far as they are there."""
    return {name: _rope_factors(file, name) for name in ROPE_FACTORS if name in file.tensors}


def _rope_factors(file: GgufFile, name: str) -> tuple[float, ...]:
    shape = file.tensors[name].shape
    if len(shape) != 1 or shape[0] > MAX_ROPE_FACTORS:
        raise CheckpointError(f"tensor {name!r} must be a vector of half a head, found shape {list(shape)}")
    _check_kind(file, name)
    return tuple(file.read(name, 0, 1)[0].tolist())


def gguf_sources(file: GgufFile) -> dict[str, Source]:
    sources = {}
    for name, tensor in file.tensors.items():
        for label, index, shape in _matrices(name, tensor.shape):
            first_row = index * shape[0]
            sources[label] = Source(
                shape,
                _gguf_fill(file, name, first_row),
                _gguf_pack(file, name, first_row, shape[0]),
                f"{file.path}: {label}",
                packed_kind(tensor.kind),
            )
    return sources


def _matrices(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(name, index, shape) of the matrices of a tensor of three axes, which are experts; else the tensor itself."""
    if len(shape) != 3 or shape[0] > MAX_MATRICES:
        yield name, 0, shape
        return
    for index in range(shape[0]):
        yield f"{name}[{index}]", index, shape[1:]


def _gguf_pack(file: GgufFile, name: str, first: int, num_rows: int) -> Pack:
    def pack(weight: PackedWeight, first_row: int, order: Tensor | None) -> None:
        tensor = file.tensors[name]
        if packed_kind(tensor.kind) == weight.kind or tensor.kind in FLOATING.values():
            weight.fill(_of_numpy(file.raw(name, first, num_rows)), tensor.kind, first_row, order)
            file.unload(name)
            return
        with naming(file.path):
            _check_kind(file, name)
        chunk = num_rows if order is not None else max(1, CHUNK_ELEMENTS // tensor.shape[-1])  # an order is of all rows
        for start, count in row_chunks(num_rows, chunk):
            weight.fill_floats(_of_numpy(file.read(name, first + start, count)), first_row + start, order)
        file.unload(name)

    return pack


def _of_numpy(values: NDArray[Any]) -> Tensor:
    """The same memory as a tensor that nobody writes to: torch has no read-only tensors and warns of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(values)


def _gguf_fill(file: GgufFile, name: str, start: int = 0) -> Fill:
    def fill(target: Tensor) -> None:
        with naming(file.path):
            _check_kind(file, name)
        rows = target if target.dim() > 1 else target.unsqueeze(0)
        for first, num_rows in row_chunks(rows.shape[0], max(1, CHUNK_ELEMENTS // rows[0].numel())):
            _write(file.read(name, start + first, num_rows), rows[first : first + num_rows])
        file.unload(name)

    return fill


def _write(values: NDArray[np.float32], target: Tensor) -> None:
    """By numpy where it can: torch shares copies out among threads, and on a busy machine these wait for each other."""
    values = values.reshape(target.shape)
    if target.is_cpu and target.dtype == torch.float32:
        np.copyto(target.numpy(), values)
    else:
        target.copy_(torch.from_numpy(np.require(values, requirements="W")))


def _check_kind(file: GgufFile, name: str) -> None:
    tensor = file.tensors[name]
    if not can_dequantize(tensor.kind):
        raise CheckpointError(f"tensor {name!r} is of kind {tensor.kind_name}, which cannot be dequantised")


# Both


def _load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, choose: KindFor | None, device: torch.device
) -> dict[str, Weight]:
    sources = checkpoint.sources()
    _check_names(checkpoint, sources)
    return fill_weights(sources, checkpoint.slots, checkpoint.config.weight_shapes(), dtype, choose, device=device)


def fill_weights(
    sources: Mapping[str, Source],
    slots: Mapping[str, Slot],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    choose: KindFor | None,
    *,
    device: torch.device = CPU,
) -> dict[str, Weight]:
    """Our tensors, by name, put together from a checkpoint's.

    Args:
        sources: has every name of `slots`.
        shapes: of our tensors; `slots` fills each.
        dtype: of those that are not packed.
        choose: which matrices are packed (`kind_for`); None: none.
        device: of those that are not packed; no more than one of a checkpoint's tensors is held elsewhere at a time.
    Raises:
        CheckpointError: a tensor of another shape or kind, or one that holds numbers that are not finite.
    """
    for name, slot in slots.items():
        check_shape(sources[name].where, slot.shape, sources[name].shape)
    weights: dict[str, Weight] = {}
    packed: dict[str, list[PackedWeight]] = {}
    for tensor, parts in parts_of(sources, slots).items():
        shape = shapes[tensor]
        if groups := packed_groups(tensor, shape, parts, choose):
            packed[tensor] = [_packed_tensor(kind, members) for kind, members in groups]
        else:
            weights[tensor] = _plain_tensor(parts, torch.empty(shape, dtype=dtype, device=device))
    for tensor, pieces in packed.items():
        bias = weights.get(f"{tensor}_bias")
        assert bias is None or isinstance(bias, Tensor)
        packed_linear = tensor != "embedding"
        weights[tensor] = PackedLinear(pieces, bias, activation_terms(tensor)) if packed_linear else pieces[0]
    return weights


def parts_of(sources: Mapping[str, AnySource], slots: Mapping[str, Slot]) -> dict[str, list[Part[AnySource]]]:
    """What each of our tensors is put together from, in row order."""
    parts: dict[str, list[Part[AnySource]]] = {}
    for name, slot in slots.items():
        parts.setdefault(slot.tensor, []).append((sources[name], slot))
    return {tensor: sorted(own, key=lambda part: part[1].start) for tensor, own in parts.items()}


def packed_groups(
    tensor: str, shape: tuple[int, ...], parts: Sequence[Part[AnySource]], choose: KindFor | None
) -> list[tuple[str, list[Part[AnySource]]]]:
    """The packed kinds that a tensor is held in, each with its parts: neighbours of one kind lie in one weight. Nothing
    where it is held plain, as all of it is where one of its parts has no packed kind."""
    kind_of = _own_kind if choose and tensor.endswith(".router") else choose
    if kind_of is None or len(shape) != 2:
        return []
    kinds = [(kind_of(source), (source, slot)) for source, slot in parts]
    known = [(kind, part) for kind, part in kinds if kind is not None]
    if len(known) < len(kinds):
        return []
    groups = itertools.groupby(known, key=lambda pair: pair[0])
    return [(kind, [part for _, part in members]) for kind, members in groups]


def _own_kind(source: Stored) -> str | None:
    """A router stays as it is: it is small, and rounding it would choose other experts."""
    return source.kind


def _plain_tensor(parts: Sequence[Part[Source]], tensor: Tensor) -> Tensor:
    for source, slot in parts:
        target = tensor[slot.start : slot.start + slot.shape[0]]
        source.fill(target)
        if not target.sum(dtype=torch.float32).isfinite():
            raise CheckpointError(f"{source.where} holds numbers that are not finite: the file is broken")
        if slot.added:
            target += slot.added
        if slot.interleaved_heads:
            target.copy_(_halves_apart(target, slot.interleaved_heads))
    return tensor


def _packed_tensor(kind: str, parts: Sequence[Part[Source]]) -> PackedWeight:
    """Parts of one kind side by side."""
    num_rows = sum(slot.shape[0] for _, slot in parts)
    weight = PackedWeight.empty(kind, num_rows, parts[0][1].shape[1])
    for source, slot in parts:
        heads = slot.interleaved_heads
        order = _halves_apart(torch.arange(slot.shape[0]), heads) if heads else None
        source.pack(weight, slot.start - parts[0][1].start, order)
    return weight


def _check_names(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> None:
    """All that we need is there, and nothing that would change the result is left over."""
    if message := missing_tensor(checkpoint, sources):
        raise CheckpointError(message)
    for name, source in sources.items():
        if name in checkpoint.slots or checkpoint.ignored.search(name):
            continue
        if name.startswith(checkpoint.layer_prefix):
            raise CheckpointError(f"{source.where} is a layer's tensor that {checkpoint.config.family} has no use for")
        logger.warning("%s is not used", _printable(source.where))


def missing_tensor(checkpoint: Checkpoint, sources: Collection[str]) -> str:
    """What to say of the first tensor that is not there; "" where all are."""
    missing = [name for name in checkpoint.slots if name not in sources]
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return f"{checkpoint.path}: tensor {missing[0]!r} is missing{more}" if missing else ""


def check_shape(where: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if expected != found:
        raise CheckpointError(f"{where}: expected shape {list(expected)}, found {list(found)}")


def _halves_apart(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows: what rope rotates together is adjacent there, half a head apart here."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
