"""Broken and malicious model files, read in a process that may take little memory and little time for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny import hf_model, save_hf, write_gguf
from tests.tiny_tokenizer import save_tiny_tokenizer

ROOT = Path(__file__).parents[2]
READ_MANY = """
import random, resource, shutil, signal, sys
from pathlib import Path

from forerun.errors import ConfigError
from forerun.models.loading import load_model, read_config, read_metadata
from forerun.models.tokenizer import load_tokenizer

GIGABYTE = 2**30
HUGE = [0, 1, 2**7, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def damage(data, draw):
    kind = draw.choice(("cut", "flip", "number", "number", "swap", "copy", "digits"))
    data, head = bytearray(data), min(len(data), 4096)
    at = draw.randrange(head)
    if kind == "cut":
        return data[: draw.randrange(len(data))]
    if kind == "flip":
        for _ in range(draw.choice((1, 1, 4, 64))):
            data[draw.randrange(head)] ^= 1 << draw.randrange(8)
    elif kind == "number":
        size = draw.choice((4, 8))
        data[at : at + size] = (draw.choice(HUGE) % 2 ** (8 * size)).to_bytes(size, "little")
    elif kind == "swap":
        other, size = draw.randrange(head), draw.randrange(1, 64)
        data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    elif kind == "copy":
        data[at:at] = data[at : at + draw.randrange(1, 256)]
    else:  # of the JSON in a header
        data = data.replace(str(draw.choice((1, 8, 16, 64))).encode(), str(draw.choice(HUGE)).encode(), 1)
    return data


def read(path):
    for reader in (load_model, read_config, read_metadata, lambda path: load_tokenizer(str(path))):
        signal.alarm(10)  # ends the process
        try:
            reader(path)
        except ConfigError as error:
            assert "\\n" not in str(error) and len(str(error)) < 2000, str(error)
        signal.alarm(0)


source, name, number, work = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
data = (source / name).read_bytes()
target = work / name if name.endswith(".gguf") else work
read(target)
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + GIGABYTE // 2, size + GIGABYTE // 2))
for seed in range(number):
    (work / name).write_bytes(damage(data, random.Random(seed)))
    try:
        read(target)
    except BaseException:
        print("seed", seed, file=sys.stderr)
        raise
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in both forms, with its tokenizer: mostly header."""
    root = tmp_path_factory.mktemp("source")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 8, "vocab_size": 8}
    model = hf_model("llama", **sizes)
    save_hf(model, root)
    save_tiny_tokenizer(root)
    write_gguf(model, root / "model.gguf")
    return root


def read_damaged(source: Path, name: str, number: int, work: Path) -> None:
    for file in source.iterdir():
        (work / file.name).write_bytes(file.read_bytes())
    result = subprocess.run(
        [sys.executable, "-c", READ_MANY, str(source), name, str(number), str(work)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


FILES = ["model.gguf", "model.safetensors", "config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES[:2])
def test_a_damaged_file_is_an_error_in_one_line(source: Path, tmp_path: Path, name: str) -> None:
    read_damaged(source, name, 150, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_damaged_files(source: Path, tmp_path: Path, name: str) -> None:
    read_damaged(source, name, 2000, tmp_path)
