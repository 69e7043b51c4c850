"""What weights will take in memory, from headers where they lie beside the config, else from the config alone.

How a tensor is held is decided by the same functions as at load, `loading.packed_groups` among them. No weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.errors import CheckpointError
from forerun.kernels.packed import packed_bytes
from forerun.memory.plan import Weights
from forerun.models.config import DecoderConfig
from forerun.models.families.base import Slot
from forerun.models.families.values import Values
from forerun.models.heads.config import HeadConfig
from forerun.models.heads.files import HeadFile, open_head
from forerun.models.heads.loading import check_head, declared_names
from forerun.models.loading import (
    Checkpoint,
    KindFor,
    Stored,
    kind_for,
    missing_tensor,
    naming,
    one_line_errors,
    open_checkpoint,
    packed_groups,
    parts_of,
    read_json,
    safetensors_files,
)

QUANTIZATION = "quantization_config"
UNQUANTISED = ("embedding", "head")  # as all tools leave them, and routers
SCALE_BYTES = 2  # of a group of quantised weights


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor that a config speaks of; see `Stored`."""

    shape: tuple[int, ...]
    kind: str | None


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are to be held.

    Attributes:
        dtype: of those that are not packed.
        packed, quantization: as in `load_model`.
    """

    dtype: torch.dtype
    packed: bool = False
    quantization: str | None = None

    @property
    def choose(self) -> KindFor | None:
        return kind_for(self.packed, self.quantization)


@dataclass(frozen=True, slots=True)
class Sizes:
    """weights: what they take. is_packed: as `Decoder.is_packed`. note: why the engine refuses them; "" if it does
    not."""

    config: DecoderConfig
    weights: Weights
    is_packed: bool
    note: str = ""


def size_decoder(path: str | Path, form: Form, bits: float | None = None) -> Sizes:
    """What `load_model` would hold.

    Args:
        bits: of the linear layers' weights, for a quantization that is not served; None: as the checkpoint has it.
    Raises:
        CheckpointError: as `load_model`, as far as headers or the config tell.
    """
    path = Path(path)
    with one_line_errors(path):
        checkpoint, note = _open(path)
        config = checkpoint.config
        sources = _sources(checkpoint)
        shapes = config.weight_shapes()
        if quantization := _quantization(path):
            weights = Weights(_quantised_bytes(shapes, form.dtype, *quantization))
            return Sizes(config, weights, False, note)
        if bits is not None:
            return Sizes(config, Weights(_quantised_bytes(shapes, form.dtype, bits, 0)), False)
        held = _held(sources, checkpoint.slots, shapes, form)
        matrices = {name: packed for name, (_, packed) in held.items() if len(shapes[name]) == 2}
        if not config.tie_word_embeddings:
            del matrices["embedding"]
        is_packed = all(packed for name, packed in matrices.items() if not name.endswith(".router"))
        total = sum(num_bytes for num_bytes, _ in held.values())
        return Sizes(config, _with_file(checkpoint, total, form), is_packed)


def _open(path: Path) -> tuple[Checkpoint, str]:
    """The checkpoint, also where its quantization keeps the engine from serving it, and the words that say so."""
    try:
        return open_checkpoint(path), ""
    except CheckpointError as error:
        if not path.is_dir() or QUANTIZATION not in read_json(path / "config.json"):
            raise
        return open_checkpoint(path, without=(QUANTIZATION,)), str(error)


def _sources(checkpoint: Checkpoint) -> Mapping[str, Stored]:
    """What the headers say; where there are none, all that the config asks for."""
    if checkpoint.path.is_file() or (_has_weights(checkpoint.path) and not _quantization(checkpoint.path)):
        sources = checkpoint.sources()
        if missing := missing_tensor(checkpoint, sources):
            raise CheckpointError(missing)
        return sources
    kind = _declared_kind(read_json(checkpoint.path / "config.json"))
    return {name: Declared(slot.shape, kind) for name, slot in checkpoint.slots.items()}


def _has_weights(path: Path) -> bool:
    try:
        return all(file.exists() for file in safetensors_files(path))
    except CheckpointError:
        return False


def _declared_kind(config: Mapping[str, Any]) -> str | None:
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return "bf16" if stored == "bfloat16" else None


def _held(
    sources: Mapping[str, Stored], slots: Mapping[str, Slot], shapes: Mapping[str, tuple[int, ...]], form: Form
) -> dict[str, tuple[int, bool]]:
    """Bytes of each of our tensors, and whether it is packed."""
    choose = form.choose
    held = {}
    for tensor, parts in parts_of(sources, slots).items():
        groups = packed_groups(tensor, shapes[tensor], parts, choose)
        num_bytes = sum(
            packed_bytes(kind, sum(slot.shape[0] for _, slot in members), shapes[tensor][1]) for kind, members in groups
        )
        held[tensor] = (num_bytes, True) if groups else (_plain_bytes(shapes[tensor], form.dtype), False)
    return held


def _plain_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


# Quantised checkpoints of Hugging Face's layout, which are counted and not served


def _quantization(path: Path) -> tuple[float, int] | None:
    """Bits of a weight, and weights that share a scale (0: too many to count); None: not quantised."""
    given = read_json(path / "config.json").get(QUANTIZATION) if path.is_dir() else None
    if not isinstance(given, dict) or not given:
        return None
    group = given
    for key in ("config_groups", "group_0", "weights"):  # compressed-tensors
        group = group.get(key, group) if isinstance(group.get(key, group), dict) else group
    bits = next((group[key] for key in ("bits", "w_bit", "num_bits") if isinstance(group.get(key), int)), None)
    if bits is None:
        method = str(given.get("quant_method", ""))
        bits = 4 if given.get("load_in_4bit") or "4" in method else 8
    size = group.get("group_size") or group.get("q_group_size")
    return float(bits), size if isinstance(size, int) and size > 0 else 0


def _quantised_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, bits: float, group: int) -> int:
    total = 0
    for tensor, shape in shapes.items():
        if len(shape) != 2 or tensor in UNQUANTISED or tensor.endswith(".router"):
            total += _plain_bytes(shape, dtype)
        else:
            count = torch.Size(shape).numel()
            total += int(count * bits / 8) + (count // group * SCALE_BYTES if group else shape[0] * SCALE_BYTES)
    return total


# A tied head that the file holds as well


def _with_file(checkpoint: Checkpoint, held: int, form: Form) -> Weights:
    """The figure, and that of a file which stores the head that the model ties to its embedding."""
    config = checkpoint.config
    if not config.tie_word_embeddings or checkpoint.path.is_file() or form.packed:
        return Weights(held)
    names = _index_names(checkpoint.path)
    if _has_weights(checkpoint.path):
        names = set(checkpoint.sources())
    if names and "lm_head.weight" not in names:
        return Weights(held)
    copy = config.vocab_size * config.hidden_size * form.dtype.itemsize
    if_stored = "" if names else " where it stores the tied head too"
    return Weights(held, held + copy, f"in the file{if_stored}; the tied head is held once")


def _index_names(path: Path) -> set[str]:
    index = path / "model.safetensors.index.json"
    return set(Values(read_json(index)).mapping("weight_map")) if index.exists() else set()


# Heads


def size_head(path: str | Path, target: DecoderConfig, form: Form) -> tuple[HeadConfig, Weights]:
    """What `load_head` would hold, and its config. Where the head has tables of its own that may equal the target's,
    which only the weights can tell, both figures.

    Raises:
        CheckpointError: as `load_head`, as far as headers or the config tell.
    """
    path = Path(path)
    with one_line_errors(path):
        file, known = _open_head(path, target)
        with naming(file.where):
            config, slots = check_head(file, target, known=known)
        sources: Mapping[str, Stored] = file.sources
        if not known:
            kind = _declared_kind(file.values.values)
            sources = {name: Declared(slot.shape, kind) for name, slot in slots.items()}
    held = _held(sources, slots, config.weight_shapes(), form)
    total = sum(num_bytes for num_bytes, _ in held.values())
    theirs = (target.vocab_size, target.hidden_size)
    shared = [name for name, shape in config.end_shapes().items() if shape == theirs]
    if not shared:
        return config, Weights(total)
    saved = sum(held[name][0] for name in shared)
    what = " and ".join({"embedding": "embedding", "head": "output head"}[name] for name in shared)
    are = "are" if len(shared) > 1 else "is"
    return config, Weights(total, total - saved, f"where its {what} {are} the target's, and so shared", True)


def read_head_config(path: str | Path, target: DecoderConfig) -> HeadConfig:
    """As `heads.read_head`, also where no weights lie beside the config."""
    path = Path(path)
    with one_line_errors(path):
        file, known = _open_head(path, target)
        with naming(file.where):
            return check_head(file, target, known=known)[0]


def _open_head(path: Path, target: DecoderConfig) -> tuple[HeadFile, bool]:
    """The head, and whether its tensors are known."""
    has_weights = path.is_file() or _has_weights(path) or any(path.glob("pytorch_model*.bin"))
    if has_weights or not (path / "config.json").exists():
        return open_head(path), True
    values = Values(read_json(path / "config.json"))
    with naming(path / "config.json"):
        names = declared_names(values)
    sources: Any = {name: Declared((), None) for name in names}

    def read(name: str) -> torch.Tensor:
        raise AssertionError(name)

    return HeadFile(values, path / "config.json", sources, read), False
