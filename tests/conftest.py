"""Shared by all tests: few threads, no hub, and a tiny target whose text is worth comparing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.methods import DraftModels

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import settings

import forerun  # noqa: F401  sets OpenMP up before torch loads it

import torch  # isort: skip

settings.register_profile("any machine", deadline=None)  # times are for benchmarks
settings.load_profile("any machine")
torch.set_num_threads(1)  # the tiny models are smaller than the hand-over to a second thread


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target T: Llama type, 2 layers, hidden 64, 320 byte-level ids, float32, peaked, 256 positions."""
    from tests.tiny_engine import save_tiny_target

    return save_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def draft_models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftModels:
    """Draft models for `tiny_model`."""
    from tests.methods import save_draft_models

    return save_draft_models(tiny_model, tmp_path_factory.mktemp("drafts"))
