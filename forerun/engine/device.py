"""Which device the engine runs on, and what a GPU that cannot be used lacks."""

from __future__ import annotations

import warnings

import torch

from forerun.errors import ConfigError

LEAST_CAPABILITY = (8, 0)  # bfloat16 products
NO_GPU = "no GPU was found"


def find_device(wanted: str) -> tuple[torch.device, str | None]:
    """The device to run on, and for "auto" on a CPU beside a GPU why that one is not used.

    Args:
        wanted: "auto", "cpu" or "cuda".
    Raises:
        ConfigError: "cuda" without a GPU that can be used; names what was found and what is needed.
    """
    if wanted == "cpu":
        return torch.device("cpu"), None
    obstacle = cuda_obstacle()
    if obstacle is None:
        return torch.device("cuda", torch.cuda.current_device()), None
    if wanted == "cuda":
        raise ConfigError(f"device='cuda' cannot be used: {obstacle}; or use device='cpu'")
    expected = torch.version.cuda is None or obstacle.endswith(NO_GPU)
    return torch.device("cpu"), None if expected else f"device='auto' runs on the CPU: {obstacle}"


def cuda_obstacle() -> str | None:
    """Why CUDA cannot be used, in one line: what was found and what is needed; None: it can."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA: install a CUDA build of PyTorch"
    with warnings.catch_warnings(record=True) as caught:  # torch says in a warning what it found
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    needed = f"PyTorch {torch.__version__} needs an NVIDIA GPU and a driver for CUDA {torch.version.cuda} or newer"
    if not usable:
        found = " ".join(str(caught[0].message).split()) if caught else NO_GPU
        return f"{needed}; {found}"
    return capability_obstacle(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def capability_obstacle(name: str, capability: tuple[int, int]) -> str | None:
    """Why a GPU of that compute capability cannot be used; None: it can."""
    if capability >= LEAST_CAPABILITY:
        return None
    return f"{name} has compute capability {_dotted(capability)}, and {_dotted(LEAST_CAPABILITY)} or newer is needed"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
