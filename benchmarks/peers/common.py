"""What both sides share: questions, servers, figures."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MIB = 2**20
START_LIMIT_S = 600
STOP_LIMIT_S = 30


@dataclass(frozen=True, slots=True)
class Question:
    category: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer. seconds: from its first token to its last."""

    num_tokens: int
    seconds: float
    num_drafted: int = 0
    num_accepted: int = 0
    token_ids: tuple[int, ...] = ()


def read_questions(path: Path, categories: Sequence[str], count: int) -> list[Question]:
    """The first turns of the first `count` questions of each category of Spec-Bench's question.jsonl."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = []
    for category in categories:
        texts = [entry["turns"][0] for entry in entries if entry["category"] == category]
        if not texts:
            known = ", ".join(dict.fromkeys(entry["category"] for entry in entries))
            raise SystemExit(f"{path} has no category {category!r}: it has {known}")
        chosen += [Question(category, text) for text in texts[:count]]
    return chosen


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second after the first token of each answer."""
    return sum(a.num_tokens - 1 for a in answers) / max(1e-9, sum(a.seconds for a in answers))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest: rounds are few."""
    return {name: float(f"{f(values):.4g}") for name, f in (("median", statistics.median), ("low", min), ("high", max))}


class Server:
    """A process that serves HTTP on a free port of this machine, from its start to the end of the `with`.

    Attributes:
        start_s: from the start of the process until /health said 200.
    """

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        started = time.perf_counter()
        full = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(full, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._wait(started + START_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.perf_counter() - started

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of the process and its children. Pages that two of them share count twice in rss, once in
        pss; pages of a mapped file count in both."""
        root = psutil.Process(self._process.pid)
        infos = [process.memory_full_info() for process in (root, *root.children(recursive=True))]
        return {name: round(sum(getattr(info, name) for info in infos) / MIB, 1) for name in ("rss", "pss")}

    def _wait(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                self._log.seek(0)
                last = self._log.read().decode(errors="replace").splitlines()[-5:]
                raise SystemExit("\n".join([f"{self._process.args} ended at once:", *last]))
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(self._url + "/health").close()
                return
            time.sleep(0.02)
        raise SystemExit(f"{self._process.args} did not get ready in {START_LIMIT_S} s")


def load_average() -> list[float]:
    """Processes that wanted a core over 1, 5 and 15 minutes: above our threads, others took part of the machine."""
    return [round(value, 1) for value in os.getloadavg()]
