"""A GPU's memory, shared out: to the byte, and refused in one line."""

from __future__ import annotations

import pytest

from forerun.errors import ConfigError
from forerun.memory.budget import GIB, GpuMemory, gpu_allowance, gpu_cache_bytes

CARD = GpuMemory(total=100 * GIB, free=80 * GIB, pass_bytes=3 * GIB, graph_bytes=1 * GIB)


def test_caches_get_what_is_left_of_the_utilization() -> None:
    assert gpu_cache_bytes(None, CARD, 0.5) == (50 - 20 - 4) * GIB
    assert gpu_cache_bytes(None, CARD, None) == int(100 * GIB * 0.92) - (20 + 4) * GIB


def test_what_was_asked_for_is_given_whatever_the_utilization() -> None:
    assert gpu_cache_bytes(76 * GIB, CARD, 0.1) == 76 * GIB
    with pytest.raises(ConfigError, match=r"is more than the 76.00 GiB that are free on the GPU beside 4.00 GiB"):
        gpu_cache_bytes(76 * GIB + 1, CARD, 1.0)


def test_nothing_may_be_left() -> None:
    assert gpu_cache_bytes(None, CARD, 0.24) == 0
    assert gpu_cache_bytes(None, CARD, 0.2) == -4 * GIB


def test_a_gpu_that_others_fill_is_refused_before_weights_load() -> None:
    assert gpu_allowance(CARD, 0.8) == 80 * GIB
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0.92 .* only 80.00 GiB are free: lower it"):
        gpu_allowance(CARD, None)
