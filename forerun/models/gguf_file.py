"""A GGUF file's header and tensors, read with every declared size checked against the file before it is believed.

gguf's own reader turns each element of each array into an object: seconds for a vocabulary, gigabytes for a broken
length. This one maps the file and reads what is asked for; kinds, block sizes and dequantisation are gguf's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, overload

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from forerun.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

UINT32, BOOL, STRING, ARRAY, UINT64 = 4, 7, 8, 9, 10
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


class Strings(Sequence[str]):
    """An array of strings, decoded when read: a vocabulary costs nothing to those who do not look at it."""

    def __init__(self, data: mmap.mmap, offsets: NDArray[np.int64]) -> None:
        self._data = data
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Strings: ...
    def __getitem__(self, index: int | slice) -> str | Strings:
        if isinstance(index, slice):
            return Strings(self._data, self._offsets[index])
        start = int(self._offsets[index])
        length: int = struct.unpack_from("<Q", self._data, start)[0]
        return str(self._data[start + 8 : start + 8 + length], "utf-8", "replace")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place. shape: as torch has it, rows first. kind: the number of its ggml type. A row is all that lies
    along the last axis; a vector is one."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def kind_name(self) -> str:
        return str(GGMLQuantizationType(self.kind).name)

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // math.prod(self.shape[:-1])


class GgufFile:
    """An open GGUF file.

    Attributes:
        metadata: key -> number, bool, str, list of numbers, or `Strings`.
        tensors: name -> where it lies; all lie within the file.

    Raises:
        CheckpointError: not a GGUF file, truncated, or of a version or layout that we do not read.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            start = file.read(4)
            if start != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it starts with {start!r}")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = len(self._data)
        self._offset = len(MAGIC)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is truncated or broken at byte {self._offset}: {error}") from None

    def read(self, name: str, first_row: int, num_rows: int) -> NDArray[np.float32]:
        """Rows of a tensor, [num_rows, ...] float32, a fresh array or a read-only view of the file."""
        tensor = self.tensors[name]
        row_bytes = tensor.row_bytes
        raw = self.raw(name, first_row, num_rows)
        with np.errstate(all="ignore"):  # broken scales give inf or nan, which is the file's business
            values: NDArray[np.float32] = dequantize(
                raw.reshape(num_rows, row_bytes), GGMLQuantizationType(tensor.kind)
            )
        return values

    def raw(self, name: str, first_row: int, num_rows: int) -> NDArray[np.uint8]:
        """The bytes of rows of a tensor, a read-only view of the file."""
        tensor = self.tensors[name]
        row_bytes = tensor.row_bytes
        return np.frombuffer(self._data, np.uint8, num_rows * row_bytes, tensor.offset + first_row * row_bytes)

    def unload(self, name: str) -> None:
        """Take a tensor's pages out of the process: for who has copied it. It can be read again, from the file."""
        tensor = self.tensors[name]
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.num_bytes - start)

    def _read_header(self) -> None:
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            hint = " (big-endian?)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(f"{self.path}: GGUF version {version}{hint} is not supported; supported: 2, 3")
        num_tensors, num_keys = self._unpack("<QQ")
        self._check_left(num_keys, 13, "metadata keys")
        self._check_left(num_tensors, 24, "tensors")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(*self._unpack("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self.tensors = self._placed(infos)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(*self._unpack("<IQ"))
        (value,) = self._unpack("<" + self._scalar(kind))
        return bool(value) if kind == BOOL else value

    def _array(self, kind: int, count: int) -> Any:
        if kind == STRING:
            return self._strings(count)
        code = self._scalar(kind)
        self._check_left(count, struct.calcsize("<" + code), "array elements")
        values = np.frombuffer(self._data, np.dtype(code).newbyteorder("<"), count, self._offset)
        self._offset += values.nbytes
        return values.astype(bool).tolist() if kind == BOOL else values.tolist()

    def _strings(self, count: int) -> Strings:
        self._check_left(count, 8, "strings")
        offsets = np.empty(count, np.int64)
        offset, data, unpack = self._offset, self._data, struct.Struct("<Q").unpack_from
        for i in range(count):
            offsets[i] = offset
            offset += 8 + unpack(data, offset)[0]
            if offset > self._size:
                raise CheckpointError(f"{self.path} is truncated: a string ends at byte {offset} of {self._size}")
        self._offset = offset
        return Strings(data, offsets)

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        self._check_left(length, 1, "characters")
        start = self._offset
        self._offset += length
        return str(self._data[start : self._offset], "utf-8")

    def _tensor_info(self) -> GgufTensor:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise CheckpointError(f"{self.path}: tensor {name!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
        shape = tuple(reversed(self._unpack(f"<{num_dims}Q")))
        kind, offset = self._unpack("<IQ")
        return GgufTensor(name, shape, kind, offset, self._num_bytes(name, shape, kind))

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        if kind not in GGMLQuantizationType.__members__.values():
            raise CheckpointError(f"{self.path}: tensor {name!r} is of unknown kind {kind}")
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if min(shape) < 1 or shape[-1] % block_size:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has shape {list(shape)}, but rows of kind "
                f"{GGMLQuantizationType(kind).name} are multiples of {block_size}"
            )
        return math.prod(shape) // int(block_size) * int(block_bytes)

    def _placed(self, infos: Sequence[GgufTensor]) -> dict[str, GgufTensor]:
        """The tensors by name, their offsets counted from the start of the file."""
        start = self._offset + -self._offset % self._alignment()
        tensors: dict[str, GgufTensor] = {}
        for info in infos:
            placed = GgufTensor(info.name, info.shape, info.kind, start + info.offset, info.num_bytes)
            end = placed.offset + placed.num_bytes
            if end > self._size:
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {info.name!r} ends at byte {end}, the file has {self._size}"
                )
            if info.name in tensors:
                raise CheckpointError(f"{self.path}: tensor {info.name!r} stands there twice")
            tensors[info.name] = placed
        return tensors

    def _alignment(self) -> int:
        alignment: Any = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment must be a power of two, got {alignment!r}")
        return int(alignment)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._offset)
        self._offset += struct.calcsize(form)
        return values

    def _scalar(self, kind: int) -> str:
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path}: metadata of unknown type {kind} at byte {self._offset}")
        return SCALARS[kind]

    def _check_left(self, count: int, size: int, what: str) -> None:
        if count * size > self._size - self._offset:
            raise CheckpointError(
                f"{self.path} is truncated or broken: it declares {count} {what} at byte {self._offset} of {self._size}"
            )


@cache
def can_dequantize(kind: int) -> bool:
    """Whether gguf can turn this kind into floats."""
    block = np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]), np.uint8)
    try:
        with np.errstate(all="ignore"):
            dequantize(block, GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def row_chunks(num_rows: int, rows_per_chunk: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of consecutive chunks."""
    for first in range(0, num_rows, rows_per_chunk):
        yield first, min(rows_per_chunk, num_rows - first)
