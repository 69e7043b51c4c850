"""The parts that time no steps: the tests marked `gpu`, and start-up."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forerun.engine.messages import NewRequest
from forerun.request import SamplingParams

from .children import results, tell
from .models import Models
from .options import Options
from .report import STARTUP_AT_MOST_S, Column, Report, met, number, yes_or_missed, yes_or_no

ROOT = Path(__file__).parents[2]
TESTS = ("-m", "gpu", "tests/gpu", "-n", "8", "-rfEP", "-p", "no:cacheprovider", "-W", "default")
CHECK_TIMEOUT_S = 400
STARTUP_TIMEOUT_S = 240
LAST_LINES = 40
FLIPS = re.compile(r"^(?P<name>.*): (?P<flips>\d+) flips in (?P<tokens>\d+) tokens$")


class Flips(NamedTuple):
    """flips: in how many places of `tokens` a text differed from the CPU's. shown: the lines worth reading."""

    flips: int
    tokens: int
    shown: list[str]


def read_flips(lines: Sequence[str]) -> Flips:
    """From the output of tests: all in sum; shown are those of bf16, every flip, and comparisons with flips."""
    found = [(line, match) for line in lines if (match := FLIPS.match(line))]
    shown = [line for line, match in found if "bf16" in line or "bfloat16" in line or int(match["flips"])]
    shown += [line for line in lines if line.startswith("flip, ")]
    return Flips(sum(int(m["flips"]) for _, m in found), sum(int(m["tokens"]) for _, m in found), shown)


def check(report: Report, options: Options) -> None:
    """The tests marked `gpu`, in a process of their own."""
    table = report.table(
        "check",
        "Tests marked gpu",
        [
            Column("passed", "passed", yes_or_no),
            Column("seconds", "seconds", number(0)),
            Column("said", "pytest", least_width=40),
        ],
    )
    command = [sys.executable, "-m", "pytest", *TESTS]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
        lines, code = (done.stdout + done.stderr).splitlines(), done.returncode
    except subprocess.TimeoutExpired:
        lines, code = [f"not done after {CHECK_TIMEOUT_S} s"], 1
    said = next((line.strip("= ") for line in reversed(lines) if re.search(r" in [\d.]+s", line)), lines[-1])
    passed = code == 0 and " passed" in f" {said}"
    table.add(passed=passed, seconds=time.perf_counter() - started, said=said)
    flips = read_flips(lines)
    table.note(f"{flips.flips} flips in {flips.tokens} tokens of all tests that count them")
    for line in (*flips.shown, *(line for line in lines if line.startswith(("FAILED ", "ERROR ")))):
        table.note(line)
    if not passed:
        print("\n".join(lines[-LAST_LINES:]))
        report.fail(f"check: {said}")


def startup(report: Report, options: Options, folder: Path) -> None:
    """From the start of a process to the end of a request of one token."""
    table = report.table(
        "startup",
        "Start-up: seconds from the start of the process to an answered request (weights are made on the device)",
        [
            Column("engine", "engine"),
            Column("seconds", "seconds", number(1)),
            Column("import_s", "start, imports", number(1)),
            Column("build_s", "engine built", number(1)),
            Column("answer_s", "first answer", number(1)),
            Column("at_most", "target", number(0)),
            Column("met", "met", yes_or_missed),
        ],
    )
    for kind in ("plain", "eagle3"):
        for result in results(f"startup-{kind}", options, folder, STARTUP_TIMEOUT_S):
            limit = STARTUP_AT_MOST_S if options.published else None
            build_s, answer_s, lines = result.values["build_s"], result.values["answer_s"], result.values["lines"]
            table.add(
                engine=kind,
                seconds=result.after_s,
                import_s=result.after_s - build_s - answer_s,
                build_s=build_s,
                answer_s=answer_s,
                at_most=limit,
                met=met(result.after_s, limit),
            )
            for line in lines:
                table.note(f"{kind}: {line}")


def start(kind: str, options: Options, folder: Path) -> None:
    """The child of `startup`."""
    started = time.perf_counter()
    engine = Models(options, folder).engine(kind, sized=options.device != "cuda")
    built = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add_request(NewRequest("first", list(range(3, 19)), params, 0))
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    assert sum(len(output.token_ids) for output in outputs) == 1, outputs
    answer_s = time.perf_counter() - built
    tell({"build_s": built - started, "answer_s": answer_s, "lines": engine.info().log_lines})
