"""Which device is taken, and what is said of a GPU that cannot be used."""

from __future__ import annotations

import warnings

import pytest
import torch

from forerun.engine.device import find_device
from forerun.errors import ConfigError


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch were a CUDA build beside a usable, old GPU."""
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))


@pytest.mark.usefixtures("cuda_build")
def test_a_gpu_is_taken_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for wanted in ("auto", "cuda"):
        assert find_device(wanted) == (torch.device("cuda", 0), None)
    assert find_device("cpu") == (torch.device("cpu"), None)


@pytest.mark.usefixtures("cuda_build")
def test_an_old_gpu_is_named() -> None:
    found = "Old GPU has compute capability 7.0, and 8.0 or newer is needed"
    with pytest.raises(ConfigError, match=f"device='cuda' cannot be used: {found}; or use device='cpu'"):
        find_device("cuda")
    assert find_device("auto") == (torch.device("cpu"), f"device='auto' runs on the CPU: {found}")


@pytest.mark.usefixtures("cuda_build")
def test_an_old_driver_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver\non your system is too old (found 12020)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with pytest.raises(ConfigError) as caught:
        find_device("cuda")
    assert "\n" not in str(caught.value)
    assert "needs an NVIDIA GPU and a driver for CUDA 13.0 or newer; CUDA initialization: The NVIDIA driver on" in str(
        caught.value
    )


@pytest.mark.usefixtures("cuda_build")
def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"CUDA 13.0 or newer; no GPU was found; or use device='cpu'"):
        find_device("cuda")
    assert find_device("auto") == (torch.device("cpu"), None)


def test_a_build_without_cuda_runs_on_the_cpu_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_device("auto") == (torch.device("cpu"), None)
    with pytest.raises(ConfigError, match="is built without CUDA: install a CUDA build of PyTorch"):
        find_device("cuda")
