"""Which method a draft's files and name speak of. No torch here, and nothing is fetched or run."""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError
from forerun.spec.keys import METHOD_ALIASES, METHODS

MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 24  # of a file of tensors

# Parts of a name, in the order in which vLLM looks for them.
_NAME_PARTS = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
_ARCHITECTURE_PARTS = (
    ("eagle3", "eagle3"),
    ("eagle", "eagle"),
    ("dflash", "dflash"),
    ("museglimmerassistant", "dflash"),
    ("dspark", "dspark"),
)
# `speculators_model_type` of a checkpoint -> method.
SPECULATORS = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "xpress": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
}


def suggested_method(model: str) -> tuple[str, str] | None:
    """The method that a draft's files, or else its name, speak of, and by what; None where nothing does.

    Of the path only the last component counts: a folder above it says nothing of the model.
    """
    by_files = _of_gguf(Path(model)) if model.endswith(".gguf") else _of_directory(model)
    if by_files is not None:
        return by_files
    name = model.rstrip("/").rpartition("/")[2].lower()
    for part, method in _NAME_PARTS:
        if part in name:
            return method, f'"{part}" in its name'
    return None


def read_config_json(folder: str | Path) -> Mapping[str, Any]:
    """The config.json of a directory; empty where there is none that can be read, which whoever loads it will say."""
    try:
        with (Path(folder) / "config.json").open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _of_directory(model: str) -> tuple[str, str] | None:
    config = read_config_json(model)
    return _of_config(config) or (_of_tensors(set(_tensor_names(Path(model)))) if config else None)


def _of_config(config: Mapping[str, Any]) -> tuple[str, str] | None:
    kind = config.get("speculators_model_type")
    if isinstance(kind, str) and kind in SPECULATORS:
        return SPECULATORS[kind], f'"speculators_model_type": "{kind}" in its config.json'
    architectures = config.get("architectures")
    for architecture in architectures if isinstance(architectures, list) else ():
        for part, method in _ARCHITECTURE_PARTS:
            if isinstance(architecture, str) and part in architecture.lower():
                return method, f'the architecture "{architecture[:60]}" in its config.json'
    kind = config.get("model_type")
    if isinstance(kind, str) and METHOD_ALIASES.get(kind, kind) in METHODS:
        return METHOD_ALIASES.get(kind, kind), f'"model_type": "{kind}" in its config.json'
    if config.get("draft_vocab_size") is not None:
        return "eagle3", '"draft_vocab_size" in its config.json'
    return None


def _of_gguf(file: Path) -> tuple[str, str] | None:
    from forerun.models.gguf_file import GgufFile  # takes a while to import

    try:
        architecture = GgufFile(file).metadata.get("general.architecture")
    except (OSError, ValueError, CheckpointError):
        return None
    return ("eagle3", f'the architecture "{architecture}" in its header') if architecture == "eagle3" else None


def _of_tensors(names: Collection[str]) -> tuple[str, str] | None:
    """Heads often call themselves what their layers are, and only their tensors tell."""
    if "layers.0.hidden_norm.weight" in names:
        return "eagle3", 'its tensor "layers.0.hidden_norm.weight"'
    if "fc.weight" in names and not {"norm.weight", "hidden_norm.weight"} & set(names):
        return "eagle", 'its tensor "fc.weight", and none "norm.weight"'
    return None


def _tensor_names(folder: Path) -> Iterator[str]:
    """The names of a directory's tensors in the spelling of a decoder's; none of a file that cannot be read."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    for file in files:
        try:
            names = _of_safetensors(file) if file.suffix == ".safetensors" else _of_pickle(file)
        except Exception:  # whatever a broken file does to its reader, whoever loads it will say it
            continue
        for name in names:
            name = name.removeprefix("model.")
            yield f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _of_safetensors(file: Path) -> Iterable[str]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, MAX_HEADER_BYTES)))
    return header if isinstance(header, dict) else ()


def _of_pickle(file: Path) -> Iterable[str]:
    """Every string of the pickle, names of tensors among them. The pickle is read as a list of words, not run."""
    with zipfile.ZipFile(file) as archive:
        member = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if member is None:
            return ()
        with archive.open(member) as opened:
            content = opened.read(MAX_HEADER_BYTES)
    return {word for _, word, _ in pickletools.genops(content) if isinstance(word, str)}
