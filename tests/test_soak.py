"""The soak: its short form, and that it would see what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import FRONT_NOISE_MIB, FRONT_SLOPE_MIB, Outages, Sample, Seen, Server, Watcher, judge_counters

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_minutes_of_traffic_with_faults() -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", "2", "--kill-every", "20"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]


def watched(front_mib: list[float], core_mib: list[float]) -> Watcher:
    watcher = Watcher(Server.__new__(Server))
    pairs = zip(front_mib, core_mib, strict=True)
    watcher.samples = [Sample(20.0 * place, front, 7, core) for place, (front, core) in enumerate(pairs)]
    return watcher


def test_a_leak_has_a_slope_and_noise_has_none() -> None:
    minutes = [place / 3 for place in range(90)]
    leak = watched([100 + 2 * m for m in minutes], [500 + 5 * m for m in minutes])
    slope, growth = leak.front()
    assert slope == pytest.approx(2.0)
    assert slope > FRONT_SLOPE_MIB
    assert growth > FRONT_NOISE_MIB
    assert leak.core_growth() > 100
    noise = watched([100 + place % 2 for place in range(90)], [500.0] * 90)
    assert noise.front()[0] < FRONT_SLOPE_MIB / 10
    assert noise.core_growth() == 0


def test_a_request_may_fail_while_the_engine_is_down_and_only_then() -> None:
    outages = Outages()
    assert not outages.overlap(0.0)
    outages.spans = [[10.0, 20.0], [30.0, float("inf")]]
    assert outages.overlap(25.0)
    outages.spans[-1][1] = 40.0
    assert outages.overlap(39.0)
    assert not outages.overlap(41.0)


def test_counters_that_do_not_agree_are_faults() -> None:
    found = {
        "vllm:spec_decode_num_accepted_tokens_total": 3.0,
        "vllm:spec_decode_num_draft_tokens_total": 4.0,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total 0": 2.0,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total 1": 1.0,
        "forerun:spec_decode_num_accepted_tokens_total suffix": 3.0,
        "vllm:generation_tokens_total": 10.0,
        "vllm:prompt_tokens_total": 5.0,
        "vllm:prompt_tokens_cached_total": 5.0,
        "vllm:request_success_total stop": 1.0,
        "vllm:request_success_total length": 1.0,
        "forerun:engine_restarts_total": 1.0,
    }
    seen = Seen(tokens=10, latencies=[1.0, 1.0])
    judge_counters(found, seen, num_kills=1)
    assert not seen.faults
    for name in found:
        seen = Seen(tokens=10, latencies=[1.0, 1.0])
        judge_counters(found | {name: found[name] + (1 if "cached" in name or "accepted" in name else -2)}, seen, 1)
        assert seen.faults, name
