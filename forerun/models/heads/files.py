"""The files of a draft head: directories (safetensors, or the pickles of older heads) and GGUF files.

Pickles are read by torch's restricted reader, which builds tensors and runs no code. A decoder's loader does not read
them at all; heads are often published in no other form.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.packed import FLOATING, PackedWeight
from forerun.models.families.values import Values
from forerun.models.gguf_file import GgufFile
from forerun.models.loading import (
    Source,
    gguf_sources,
    naming,
    read_json,
    safetensors_files,
    safetensors_sources,
    shard_names,
)

Read = Callable[[str], Tensor]
"""A tensor by its name in `HeadFile.sources`, as it is stored."""


@dataclass(frozen=True, slots=True)
class HeadFile:
    """An opened head.

    Attributes:
        values: config.json, or a GGUF file's metadata.
        where: the file that they stand in.
        sources: its tensors. In directories without a leading `model.`, and `layers.0.` where the file has `midlayer.`.
        read: for the few that are no weights.
        gguf: the GGUF file; None for a directory.
    """

    values: Values
    where: Path
    sources: Mapping[str, Source]
    read: Read
    gguf: GgufFile | None = None


def open_head(path: Path) -> HeadFile:
    """Read the header of whatever lies there.

    Raises:
        CheckpointError: nothing that holds a head.
        OSError: it cannot be read.
    """
    if path.is_file():
        return _open_gguf(path)
    config = path / "config.json"
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory")
    if not config.exists():
        raise CheckpointError(f"{path} has no config.json")
    sources, read = _pickles(path) if _has_pickles_only(path) else _safetensors(path)
    ours = {name: _our_name(name) for name in sources}
    theirs = {name: stored for stored, name in ours.items()}
    return HeadFile(
        Values(read_json(config)),
        config,
        {ours[name]: source for name, source in sources.items()},
        lambda name: read(theirs[name]),
    )


def _our_name(name: str) -> str:
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _safetensors(path: Path) -> tuple[dict[str, Source], Read]:
    def read(name: str) -> Tensor:
        for file in safetensors_files(path):
            with safe_open(file, framework="pt") as opened:
                for stored in opened.keys():  # noqa: SIM118 (not a dict)
                    if stored.removeprefix("model.") == name:
                        tensor: Tensor = opened.get_tensor(stored)
                        return tensor
        raise KeyError(name)

    return safetensors_sources(path), read


def _has_pickles_only(path: Path) -> bool:
    return any(path.glob("pytorch_model*.bin")) and not any(path.glob("*.safetensors"))


def _pickles(path: Path) -> tuple[dict[str, Source], Read]:
    index = path / "pytorch_model.bin.index.json"
    names = shard_names(index) if index.exists() else ["pytorch_model.bin"]
    tensors: dict[str, Tensor] = {}
    sources: dict[str, Source] = {}
    for name in names:
        for stored, tensor in _unpickled(path / name).items():
            short = stored.removeprefix("model.")
            if short in tensors:
                raise CheckpointError(f"{path / name}: tensor {short!r} stands there twice")
            tensors[short] = tensor
            sources[short] = _source_of(tensor, f"{path / name}: {stored}")
    return sources, tensors.__getitem__


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file}: not a file of tensors: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise CheckpointError(f"{file} must hold named tensors and nothing else")
    return loaded


def _source_of(tensor: Tensor, where: str) -> Source:
    """A tensor that is there already, as the loader takes it."""

    def checked() -> Tensor:
        if tensor.dtype not in FLOATING:
            raise CheckpointError(f"{where} is of kind {tensor.dtype}, supported: float32, float16, bfloat16")
        return tensor

    def fill(target: Tensor) -> None:
        target.copy_(checked())

    def pack(weight: PackedWeight, first_row: int, order: Tensor | None) -> None:
        weight.fill_floats(checked(), first_row, order)

    return Source(tuple(tensor.shape), fill, pack, where, "bf16" if tensor.dtype == torch.bfloat16 else None)


def _open_gguf(path: Path) -> HeadFile:
    file = GgufFile(path)

    def read(name: str) -> Tensor:
        kind = file.tensors[name].kind_name
        if kind not in ("I32", "I64"):
            raise CheckpointError(f"{path}: tensor {name!r} is of kind {kind}, supported: I32, I64")
        dtype = np.int32 if kind == "I32" else np.int64
        tensor = file.tensors[name]
        values = file.raw(name, 0, tensor.num_bytes // tensor.row_bytes).view(dtype).astype(np.int64)
        return torch.from_numpy(values).view(tensor.shape)

    with naming(path):
        architecture = Values(file.metadata).text("general.architecture")
        if architecture != "eagle3":
            raise CheckpointError(f"general.architecture={architecture!r} is no draft head that is supported: eagle3")
    return HeadFile(Values(file.metadata), path, gguf_sources(file), read, file)
