"""The door to the Triton kernels. Without Triton, models on a GPU run on plain torch, several times slower."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

_ops: ModuleType | None
_product: ModuleType | None
_sampling: ModuleType | None
try:
    from forerun.kernels import triton_ops as _ops
    from forerun.kernels import triton_product as _product
    from forerun.kernels import triton_sampling as _sampling
except ImportError:
    _ops = _product = _sampling = None


def available() -> bool:
    """Whether Triton is there."""
    return _ops is not None


def ops() -> ModuleType:
    """`triton_ops`, the kernels' callers."""
    assert _ops is not None, "ask available() first"
    return _ops


def product_ops() -> ModuleType:
    """`triton_product`, products whose rows are bit-exact."""
    assert _product is not None, "ask available() first"
    return _product


def sampling_ops() -> ModuleType:
    """`triton_sampling`, the callers of those that draw and judge."""
    assert _sampling is not None, "ask available() first"
    return _sampling


def serves(x: Tensor) -> bool:
    """Whether the kernels compute with it."""
    return x.is_cuda and _ops is not None
