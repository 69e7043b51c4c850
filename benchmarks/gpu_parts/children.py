"""Parts that need a process of their own. A child prints each result as a line that begins with a mark."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from .options import Options

MARK = "RESULT "
SCRIPT = Path(__file__).parents[1] / "gpu.py"
LAST_LINES = 15


class Result(NamedTuple):
    """after_s: since the child was started."""

    after_s: float
    values: dict[str, Any]


def tell(values: Mapping[str, Any]) -> None:
    """In a child: a result."""
    print(f"\n{MARK}{json.dumps(values)}", flush=True)


def results(kind: str, options: Options, folder: Path, timeout_s: float) -> Iterator[Result]:
    """Run a child (`CHILDREN` of gpu.py) and yield its results as they come.

    Raises:
        RuntimeError: it failed, or took too long; its last lines are on stderr.
    """
    command = [sys.executable, str(SCRIPT), "--child", kind, json.dumps(asdict(options)), str(folder)]
    started = time.perf_counter()
    others = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(MARK):
                    yield Result(time.perf_counter() - started, json.loads(line.removeprefix(MARK)))
                else:
                    others.append(line.rstrip())
            code = child.wait()
        finally:
            timer.cancel()
            child.kill()
        errors.seek(0)
        lines = [*others, *errors.read().splitlines()][-LAST_LINES:]
    if code:
        took = time.perf_counter() - started
        print("\n".join(lines), file=sys.stderr)
        raise RuntimeError(f"{kind}: exit status {code} after {took:.0f} s: {lines[-1] if lines else 'no output'}")
