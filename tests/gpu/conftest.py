"""What runs on a GPU. `-rP` shows the flips that were seen.

With TRITON_INTERPRET=1 the kernels of `test_attention.py` and `test_kernels.py` run on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no usable GPU")
    return torch.device("cuda")
