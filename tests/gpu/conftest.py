"""What runs on a GPU, and the flips that were seen there."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import flips


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in flips.SEEN:
        terminalreporter.write_line(line)


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no usable GPU")
    return torch.device("cuda")
