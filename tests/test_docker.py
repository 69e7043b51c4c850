"""The images' descriptions, as far as they can be judged without Docker; scripts/image-smoke does what they say."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("name", FILES)
def test_an_image_serves_and_is_built_from_what_is_there(name: str) -> None:
    lines = (ROOT / "deploy/docker" / name).read_text().splitlines()
    (entry,) = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT ")]
    assert json.loads(entry) == ["forerun", "serve"]
    assert "EXPOSE 8000" in lines  # the default of --port
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    assert {"pyproject.toml", "native", "forerun", "constraints.txt"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert any(fnmatch(source, pattern) for pattern in allowed), f".dockerignore keeps {source} out"


def test_the_smoke_script_runs_the_images_own_entry_point() -> None:
    script = (ROOT / "scripts/image-smoke").read_text()
    assert re.search(r"ENTRYPOINT .*Dockerfile\.cpu", script)
    assert '"${entry[@]}"' in script
