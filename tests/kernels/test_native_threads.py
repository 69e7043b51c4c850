"""The extension's own threads: results and liveness do not depend on how many there are or who calls."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from gguf import GGMLQuantizationType

from forerun.kernels import native

if not native.available():
    pytest.skip("the CPU extension is not built", allow_module_level=True)

from forerun.kernels.packed import PackedLinear
from tests.kernels.native_cases import packed, rows


def test_callers_on_several_threads_get_their_own_results() -> None:
    linear = PackedLinear([packed(GGMLQuantizationType.Q4_0, 500, 256)])
    inputs = [rows(5, 256, seed) for seed in range(6)]
    expected = [linear(x) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(100):
            if not torch.equal(linear(inputs[index]), expected[index]):
                wrong.append(index)

    with native.use(num_threads=3):
        threads = [threading.Thread(target=call, args=(index,)) for index in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_many_more_threads_than_cores_finish() -> None:
    linear, x = PackedLinear([packed(GGMLQuantizationType.Q8_0, 1000, 256)]), rows(4, 256)
    expected = linear(x)
    with native.use(num_threads=16):
        for _ in range(200):
            assert torch.equal(linear(x), expected)


def test_the_number_of_threads_may_change_at_any_time() -> None:
    linear, x = PackedLinear([packed(GGMLQuantizationType.Q4_1, 1000, 256)]), rows(4, 256)
    expected = linear(x)
    before = native.num_threads()
    for count in [1, 4, 2, 0, 3, 1, 2] * 5:
        native.set_num_threads(count)
        assert native.num_threads() == max(1, count)
        assert torch.equal(linear(x), expected)
    native.set_num_threads(before)


ALONE = """
import importlib.util
spec = importlib.util.spec_from_file_location("_native", {path!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
"""  # the extension without the package: a subprocess need not import torch

FORKING = """
import array, os
n, k, rows = 500, 64, 4
weights, bias = bytearray(native.packed_bytes("bf16", n, k) + 64), array.array("f", range(n))
held = array.array("B", weights)
start = held.buffer_info()[0] + -held.buffer_info()[0] % 64
x, y = array.array("f", [1.0] * rows * k), array.array("f", [0.0] * rows * n)
native.set_num_threads(3)
linear = native.Linear(k, [("bf16", start, n, bias.buffer_info()[0])], 1)

def right():
    for _ in range(20):
        linear.run(x.buffer_info()[0], k, rows, y.buffer_info()[0], n)
    return list(y) == [float(i) for i in range(n)] * rows

assert right()
child = os.fork()
if child == 0:
    os._exit(0 if right() else 1)
assert os.waitpid(child, 0)[1] == 0
assert right()
"""


def run_alone(code: str, **environment: str) -> str:
    code = ALONE.format(path=native.extension().__file__) + code
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_too() -> None:
    run_alone(FORKING)


def test_the_environment_variable_limits_the_instruction_set() -> None:
    for isa in native.isas():
        assert run_alone("print(native.isa())", FORERUN_ISA=isa) == isa


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="avx9"), native.use(isa="avx9"):
        pass
