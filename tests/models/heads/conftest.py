from __future__ import annotations

from pathlib import Path

import pytest

from forerun.models.decoder import Decoder
from forerun.models.loading import load_model

from ..tiny import hf_model, save_hf
from .tiny_heads import TARGET_LAYERS


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf_model("llama", seed=1, num_hidden_layers=TARGET_LAYERS)
    return save_hf(model, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_path: Path) -> Decoder:
    return load_model(target_path)
