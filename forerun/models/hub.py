"""Models of the Hugging Face hub, by their id: what a directory or a GGUF file needs is fetched, and nothing else.

`huggingface_hub` does the transfers and keeps its own cache; its environment variables hold (HF_HUB_OFFLINE, HF_HOME,
HF_TOKEN, HF_ENDPOINT). Code that lies in a repository is neither fetched nor run.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError

logger = logging.getLogger(__name__)

CONFIGS = ("config.json", "generation_config.json")
TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
TOKENIZER_PARTS = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")  # where no tokenizer.json is
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_REASON = 300

_NAME = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^\s:@]+))?(:(?P<file>[^\s:]+))?")
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".json")


@dataclass(frozen=True)
class HubModel:
    """A model of the hub: `organisation/name`, then `@revision` and `:file`, both optional.

    Attributes:
        revision: a branch, a tag or a commit; None: the default branch.
        file: which GGUF file of several, by its name or a part of it (`Q4_K_M`).
    """

    id: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubModel | None:
        """None where the name is not of that form, or looks like a file's."""
        match = _NAME.fullmatch(name)
        if match is None or match["id"].endswith(_FILE_ENDINGS):
            return None
        return cls(match["id"], match["revision"], match["file"])

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def fetch_from_hub(model: HubModel, progress: bool = True, weights: bool = True) -> Path:
    """A directory with config, tokenizer and safetensors, or a GGUF file; from the cache where that has it.

    Where the hub cannot be reached a copy in the cache does, with a warning.

    Args:
        progress: show bars on stderr.
        weights: whether they are needed; a GGUF file has all in one and is always fetched.
    Raises:
        CheckpointError: not there, gated, offline and not in the cache, or without a file that we read; one line.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    def snapshot(names: Collection[str], cached: bool = False) -> Path:
        """The directory of the revision in the cache, with these files of it."""
        patterns = [glob.escape(name) for name in names]
        return Path(
            hub.snapshot_download(model.id, revision=model.revision, allow_patterns=patterns, local_files_only=cached)
        )

    with _one_line_errors(model), _bars(progress):
        try:
            siblings = hub.HfApi().model_info(model.id, revision=model.revision).siblings or []
        except (hub.errors.HfHubHTTPError, HFValidationError):  # the hub has answered, or will not be asked
            raise
        except Exception as error:
            folder = _cached(model, lambda: snapshot([], cached=True), error)
            if not isinstance(error, OfflineModeIsEnabled):
                logger.warning("the hub cannot be reached: %s is taken from the cache, %s", model, folder)
            names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
            copy = f"the copy of {model} in the cache"
            return _place(folder, _chosen(copy, model.file, names, weights, lambda name: folder / name))
        names = [sibling.rfilename for sibling in siblings]
        wanted = _chosen(str(model), model.file, names, weights, lambda name: snapshot([name]) / name)
        return _place(snapshot(wanted), wanted)


def _cached(model: HubModel, local: Callable[[], Path], error: Exception) -> Path:
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return local()
    except LocalEntryNotFoundError:
        if isinstance(error, OfflineModeIsEnabled):
            raise CheckpointError(
                f"{model}: no such file or directory, and not in the cache of the hub while HF_HUB_OFFLINE is set: "
                "unset it, or give a path"
            ) from None
        raise CheckpointError(
            f"{model}: no such file or directory, the hub cannot be reached ({_reason(error)}) and its cache does not "
            "have it: check the network, or give a path"
        ) from None


def _place(folder: Path, names: Collection[str]) -> Path:
    """What a loader takes: the GGUF file, or the directory."""
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    return folder if gguf is None else folder / gguf


def _chosen(
    who: str, file: str | None, names: Collection[str], weights: bool, read: Callable[[str], Path]
) -> list[str]:
    """The files to fetch, of those that the repository has. read: brings one of them."""
    ggufs = [name for name in names if name.endswith(".gguf")]
    if file is not None:
        return [_named(who, file, ggufs)]
    tokenizer = ("tokenizer.json",) if "tokenizer.json" in names else TOKENIZER_PARTS
    small = [name for name in (*CONFIGS, *TOKENIZER, *tokenizer) if name in names]
    if small and not weights and not (ggufs and "config.json" not in names):
        return small
    tensors = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if "config.json" not in names or not tensors:
        if ggufs:
            return [_only(who, ggufs)]
        pickles = next((name for name in names if name.endswith((".bin", ".pt", ".pth"))), None)
        hint = f"; pickles ({pickles}) are not read: they can run code" if pickles and not tensors else ""
        raise CheckpointError(f"{who} has neither config.json with *.safetensors nor a *.gguf file{hint}")
    if SINGLE in names:
        return [*small, SINGLE]
    if INDEX in names:
        return [*small, INDEX, *_shards(who, read(INDEX), names)]
    return [*small, *tensors]


def _named(who: str, file: str, ggufs: Collection[str]) -> str:
    if file in ggufs:
        return file
    fitting = [name for name in ggufs if file.lower() in name.lower()]
    if len(fitting) != 1:
        found = f"{len(fitting)} GGUF files fit" if fitting else "no GGUF file fits"
        raise CheckpointError(f"{who}: {found} {file!r}; there are: {', '.join(fitting or ggufs) or 'none'}")
    return fitting[0]


def _only(who: str, ggufs: Collection[str]) -> str:
    if len(ggufs) > 1:
        raise CheckpointError(
            f"{who} has {len(ggufs)} GGUF files: name one, as in organisation/name:Q4_K_M; there are: "
            f"{', '.join(ggufs)}"
        )
    return next(iter(ggufs))


def _shards(who: str, index: Path, names: Collection[str]) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{who}: {INDEX} is broken: {_reason(error)}") from None
    for shard in shards:
        if shard not in names:
            raise CheckpointError(f"{who}: {INDEX} names {shard!r}, which is not there")
    return shards


@contextlib.contextmanager
def _one_line_errors(model: HubModel) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError:
        raise CheckpointError(f"{model} is gated: accept its terms on the hub, then log in (or set HF_TOKEN)") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{model}: no such file or directory, and no such model on the hub (for a private one set HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{model.id} has no revision {model.revision!r}") from None
    except Exception as error:  # of the client, its transport, or the disk
        raise CheckpointError(f"{model}: could not be fetched from the hub: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:MAX_REASON]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    utils: Any
    from huggingface_hub import utils

    if shown or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()
