"""A server in a process of its own on this machine, ours or a peer's."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import psutil

from forerun.errors import ConfigError

MIB = 2**20
START_LIMIT_S = 600
STOP_LIMIT_S = 30
LAST_LINES = 5  # of a server's log, where it ended at once


class Server:
    """A process that serves HTTP on a free port of this machine, from its start to the end of the `with`.

    Attributes:
        url: where it is.
        start_s: from the start of the process until /health said 200.

    Raises:
        ConfigError: it ended at once, with the last lines of its log; or it did not get ready.
    """

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._name = " ".join(command)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        started = time.perf_counter()
        full = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(full, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)
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
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
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
                last = self._log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
                raise ConfigError(f"{self._name} ended at once: {' '.join(last)}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(self.url + "/health").close()
                return
            time.sleep(0.02)
        raise ConfigError(f"{self._name} did not get ready in {START_LIMIT_S} s")
