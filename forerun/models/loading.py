"""Checkpoints to decoders: directories in Hugging Face's layout (safetensors) and GGUF files.

The whole header is checked (names, shapes, kinds, sizes) before memory is taken; tensors are then converted one by one
into their place in our fused tensors, so that no second copy of the model is ever held. Pickles are not read.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.families import family_of
from forerun.models.families.base import Family, Slot, Values
from forerun.models.gguf_file import GgufFile, can_dequantize, row_chunks

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 64 << 20
MAX_MESSAGE = 1000
CHUNK_ELEMENTS = 1 << 18  # dequantised at once: small enough to stay in a core's cache
DEFAULT_MAX_POSITIONS = 1 << 17
SAFETENSORS_KINDS = ("F32", "F16", "BF16")
ROPE_FACTORS = "rope_freqs.weight"

Fill = Callable[[Tensor], None]
"""Writes a checkpoint's tensor, rows in the checkpoint's order, into a tensor of its shape."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a checkpoint, not read yet."""

    shape: tuple[int, ...]
    fill: Fill
    where: str  # the file and the tensor's name there


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


def load_model(path: str | Path, dtype: torch.dtype = torch.float32, max_positions: int | None = None) -> Decoder:
    """Load a decoder.

    Args:
        path: a directory with config.json and *.safetensors, or a .gguf file.
        dtype: of the weights in memory and of the computation.
        max_positions: longest sequence to be computed; None: the config's, at most DEFAULT_MAX_POSITIONS.
    Raises:
        CheckpointError: missing, broken or unsupported; one line that names the file and the tensor.
    """
    path = Path(path)
    with _one_line_errors(path):
        checkpoint = _open(path)
        weights = _load_weights(checkpoint, dtype)
    limit = min(checkpoint.config.max_position_embeddings, DEFAULT_MAX_POSITIONS)
    return Decoder(checkpoint.config, weights, max_positions or limit)


def read_config(path: str | Path) -> DecoderConfig:
    """What `load_model` would load, from config.json or the GGUF header alone.

    Raises:
        CheckpointError: as `load_model`.
    """
    path = Path(path)
    with _one_line_errors(path):
        return _open(path).config


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
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


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path)
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
def _naming(path: Path) -> Iterator[None]:
    """A config's errors say what is wrong; this adds where."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


# Hugging Face layout


def _open_directory(path: Path) -> Checkpoint:
    config_path = path / "config.json"
    if not config_path.exists():
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; pass the GGUF file itself: {path / ggufs[0]}" if ggufs else ""
        raise CheckpointError(f"{path} has no config.json{hint}")
    values = Values(_read_json(config_path))
    with _naming(config_path):
        family = family_of(values.text("model_type"), "model_type")
        config = family.from_hf(values)
    config = _with_generation_config(config, path / "generation_config.json")
    ignored = r"rotary_emb\.inv_freq$" + (r"|^lm_head\.weight$" if config.tie_word_embeddings else "")
    return Checkpoint(
        path, config, family.hf_slots(config), "layers.", lambda: _safetensors_sources(path), re.compile(ignored)
    )


def _with_generation_config(config: DecoderConfig, path: Path) -> DecoderConfig:
    """Chat models often name further end tokens there only."""
    if not path.exists():
        return config
    values = Values(_read_json(path))
    with _naming(path):
        ids = (*config.eos_token_ids, *values.token_ids("eos_token_id"))
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(ids)))


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _safetensors_sources(path: Path) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for file in _safetensors_files(path):
        for name, source in _file_sources(file).items():
            short = name.removeprefix("model.")
            if short in sources:
                raise CheckpointError(f"{source.where}: the tensor stands there twice, also in {sources[short].where}")
            sources[short] = source
    return sources


def _safetensors_files(path: Path) -> list[Path]:
    """One file, or the shards that the index names, or whatever there is."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        return [path / name for name in _shard_names(index)]
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for p in path.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{path} holds pickles only ({pickles[0]}), which can run code when they are read: convert to safetensors"
        )
    raise CheckpointError(f"{path} has no *.safetensors file")


def _shard_names(index: Path) -> list[str]:
    with _naming(index):
        names = Values(_read_json(index)).mapping("weight_map").values()
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
        where = f"{file}: {name}"
        sources[name] = Source(tuple(part.get_shape()), _safetensors_fill(opened, name, part.get_dtype(), where), where)
    return sources


def _safetensors_fill(opened: Any, name: str, kind: str, where: str) -> Fill:
    def fill(target: Tensor) -> None:
        if kind not in SAFETENSORS_KINDS:
            raise CheckpointError(f"{where} is of kind {kind}, supported: {', '.join(SAFETENSORS_KINDS)}")
        target.copy_(opened.get_tensor(name))

    return fill


# GGUF


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    with _naming(path):
        family, config = _gguf_config(file)
    ignored = re.compile(rf"^{re.escape(ROPE_FACTORS)}$")
    return Checkpoint(path, config, family.gguf_slots(config), "blk.", lambda: _gguf_sources(file), ignored)


def _gguf_config(file: GgufFile) -> tuple[Family, DecoderConfig]:
    general = Values(file.metadata)
    name = general.text("general.architecture")
    family = family_of(name, "general.architecture")
    if general.integer("split.count", 1) > 1:
        raise CheckpointError("split GGUF files are not supported: merge the parts with llama.cpp's gguf-split")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    if "token_embd.weight" not in shapes:
        raise CheckpointError("tensor 'token_embd.weight' is missing")
    config = family.from_gguf(general, Values(file.metadata, f"{name}."), shapes)
    if ROPE_FACTORS not in shapes:
        return family, config
    _check_shape(ROPE_FACTORS, (config.head_dim // 2,), shapes[ROPE_FACTORS])
    _check_kind(file, ROPE_FACTORS)
    factors = tuple(file.read(ROPE_FACTORS, 0, 1)[0].tolist())
    return family, dataclasses.replace(config, rope=dataclasses.replace(config.rope, frequency_factors=factors))


def _gguf_sources(file: GgufFile) -> dict[str, Source]:
    return {
        name: Source(tensor.shape, _gguf_fill(file, name), f"{file.path}: {name}")
        for name, tensor in file.tensors.items()
    }


def _gguf_fill(file: GgufFile, name: str) -> Fill:
    def fill(target: Tensor) -> None:
        with _naming(file.path):
            _check_kind(file, name)
        rows = target if target.dim() > 1 else target.unsqueeze(0)
        for first, num_rows in row_chunks(rows.shape[0], max(1, CHUNK_ELEMENTS // rows[0].numel())):
            _write(file.read(name, first, num_rows), rows[first : first + num_rows])

    return fill


def _write(values: NDArray[np.float32], target: Tensor) -> None:
    """By numpy where it can: torch shares copies out among threads, and on a busy machine these wait for each other."""
    values = values.reshape(target.shape)
    if target.dtype == torch.float32:
        np.copyto(target.numpy(), values)
    else:
        target.copy_(torch.from_numpy(np.require(values, requirements="W")))


def _check_kind(file: GgufFile, name: str) -> None:
    tensor = file.tensors[name]
    if not can_dequantize(tensor.kind):
        raise CheckpointError(f"tensor {name!r} is of kind {tensor.kind_name}, which cannot be dequantised")


# Both


def _load_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    sources = checkpoint.sources()
    _check_names(checkpoint, sources)
    for name, slot in checkpoint.slots.items():
        _check_shape(sources[name].where, slot.shape, sources[name].shape)
    weights = {name: torch.empty(shape, dtype=dtype) for name, shape in checkpoint.config.weight_shapes().items()}
    for name, slot in checkpoint.slots.items():
        target = weights[slot.tensor][slot.start : slot.start + slot.shape[0]]
        sources[name].fill(target)
        if not target.sum().isfinite():
            raise CheckpointError(f"{sources[name].where} holds numbers that are not finite: the file is broken")
        if slot.interleaved_heads:
            target.copy_(_halves_apart(target, slot.interleaved_heads))
    return weights


def _check_names(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> None:
    """All that we need is there, and nothing that would change the result is left over."""
    missing = [name for name in checkpoint.slots if name not in sources]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{checkpoint.path}: tensor {missing[0]!r} is missing{more}")
    for name, source in sources.items():
        if name in checkpoint.slots or checkpoint.ignored.search(name):
            continue
        if name.startswith(checkpoint.layer_prefix):
            raise CheckpointError(f"{source.where} is a layer's tensor that {checkpoint.config.family} has no use for")
        logger.warning("%s is not used", _printable(source.where))


def _check_shape(where: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if expected != found:
        raise CheckpointError(f"{where}: expected shape {list(expected)}, found {list(found)}")


def _halves_apart(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows: what rope rotates together is adjacent there, half a head apart here."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
