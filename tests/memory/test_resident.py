"""What stays in memory that nobody needs any more: nothing of size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from forerun.memory.heap import trim_heap
from forerun.models.gguf_file import GgufFile
from forerun.models.loading import load_model
from tests.models.tiny import hf_model, write_gguf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 1 << 20


def resident(name: str = "") -> int:
    """Bytes of this process in memory; of the mappings of one file if named."""
    total, counted = 0, not name
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            counted = not name or rest.endswith(name)
        elif head == "Rss:" and counted:
            total += int(rest.split()[0]) << 10
    return total


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    write_gguf(hf_model("llama", vocab_size=60_000), path, Kind.F32)
    assert path.stat().st_size > 10 * MIB
    return path


def test_a_tensor_leaves_memory_and_can_be_read_again(large_file: Path) -> None:
    file = GgufFile(large_file)
    name = max(file.tensors, key=lambda name: file.tensors[name].num_bytes)
    rows = file.tensors[name].shape[0]
    before = file.raw(name, 0, rows).copy()
    assert resident(large_file.name) > len(before)
    file.unload(name)
    assert resident(large_file.name) < len(before) // 2
    assert (file.raw(name, 0, rows) == before).all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_is_never_in_memory_twice(large_file: Path, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = []
    unload = GgufFile.unload

    def watched(file: GgufFile, name: str) -> None:
        unload(file, name)
        mapped.append(resident(large_file.name))

    monkeypatch.setattr(GgufFile, "unload", watched)
    load_model(large_file, torch.float32, packed=packed)
    assert len(mapped) > 10
    assert max(mapped) < 3 * MIB, "pages of tensors that were read stay in memory"


def test_freed_memory_goes_back() -> None:
    blocks = [bytes(4000) for _ in range(32_000)]
    survivors = blocks[-1:]  # what lies above the freed blocks keeps them from going by themselves
    full = resident()
    del blocks
    trim_heap()
    assert full - resident() > 60 * MIB
    assert survivors
