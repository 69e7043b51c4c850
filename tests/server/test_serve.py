"""A server process from its command line to its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.cli.serve import environment_keys, parse_bytes, parse_count
from forerun.errors import ConfigError
from forerun.server.run import bind

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from forerun.cli import main; main()", "serve"]
FAKE = """
import json
import sys
from forerun.engine.config import EngineConfig
from forerun.engine.core import log_to_stderr
from forerun.server.run import serve
from forerun.server.settings import ServerSettings, WebSettings
from tests.server.fake_engine import ByteTokenizer, fake_factory
if __name__ == "__main__":
    log_to_stderr("server")
    settings = ServerSettings(model="fake", log_stats_interval_s=0.2)
    options = {"shutdown_timeout_s": 10} | json.loads(sys.argv[1])
    web = WebSettings(host="127.0.0.1", port=0, **options)
    sys.exit(serve(EngineConfig(model="fake"), settings, web, fake_factory(step_s=0.01, burst=1), ByteTokenizer()))
"""


class Process:
    """A fake-engine server in a process of its own; `lines` is what it said on stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found[found.lastindex or 0]
            time.sleep(0.01)
        raise AssertionError(f"{pattern} was not said:\n" + "".join(self.lines))

    def end(self) -> int:
        code = self.process.wait(20)
        self._reader.join(5)
        return code


@contextmanager
def fake_server(**web: Any) -> Iterator[tuple[Process, httpx.Client]]:
    """`web` are fields of `WebSettings`."""
    command = [sys.executable, "-c", FAKE, json.dumps(web)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as popen:
        process = Process(popen)
        try:
            url = process.wait_for(r"Starting forerun server on (\S+)")
            process.wait_for(r"Application startup complete\.")
            with httpx.Client(base_url=url.replace("unix:", "http://"), timeout=20) as http:
                yield process, http
        finally:
            popen.kill()
            process.end()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_streams_end_and_exits_with_0(number: signal.Signals) -> None:
    with fake_server() as (process, http):
        process.wait_for("CPU KV cache size: 1,024 tokens")
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 60, "stream": True}) as response:
            process.wait_for("Engine 000: Avg prompt throughput")
            process.process.send_signal(number)
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert process.end() == 0
        process.wait_for("SpecDecoding metrics: Mean acceptance length")
        assert "Traceback" not in "".join(process.lines)


def test_an_engine_that_dies_ends_the_server_with_1() -> None:
    with fake_server() as (process, http):
        assert http.post("/v1/completions", json={"prompt": "!raise"}).status_code == 500
        assert http.get("/health").status_code == 503
        assert process.end() == 1
        process.wait_for("the engine died: ZeroDivisionError: the device is on fire")


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60, check=False
    )


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = result.stderr.splitlines()
    assert result.returncode == 1, result.stderr
    assert lines[-1].startswith("forerun: error: ")
    assert all(word in lines[-1] for word in words), lines[-1]
    assert "Traceback" not in result.stderr


def test_a_port_is_taken_from_the_start_not_only_once_the_model_is_loaded() -> None:
    with bind("127.0.0.1", 0) as loading:
        port = loading.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", port).close()  # free again at once


def test_a_port_in_use_is_one_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_serve("no-such-model", "--host", "127.0.0.1", "--port", port)
    assert_refused(result, port, "in use")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model", "--port", "0"], ["no-such-model"]),
        (["m", "--max-model-len", "12x"], ["--max-model-len", "12x"]),
        (["m", "--kv-cache-memory", "lots"], ["--kv-cache-memory", "lots"]),
        (["m", "--max-num-seqs", "0"], ["max_num_seqs"]),
        (["m", "--device", "tpu"], ["device", "tpu"]),
        (["m", "--port", "99999"], ["port", "99999"]),
        (["m", "--host", "no.such.host.invalid", "--port", "0"], ["no.such.host.invalid"]),
        (["m", "--speculative-config", '{"method": "eagel3"}'], ["eagel3"]),
        (["m", "--enable-per-request-metrics", "--disable-log-stats"], ["enable_per_request_metrics"]),
        (["m", "--uvicorn-log-level", "loud"], ["uvicorn_log_level", "loud"]),
        (["m", "--api-key-file", "no/such/file"], ["--api-key-file", "no/such/file"]),
        (["m", "--ssl-keyfile", "key.pem"], ["ssl_keyfile", "ssl_certfile"]),
        (["m", "--max-connections", "0"], ["max_connections", "0"]),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_1(arguments: list[str], words: list[str]) -> None:
    assert_refused(run_serve(*arguments), *words)


def test_neither_the_help_nor_the_front_imports_torch() -> None:
    check = (
        "import sys, forerun.server.run, forerun.models.tokenizer, forerun.cli.serve; "
        "from forerun.cli import build_app; build_app(None); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2M", 2**21), ("auto", None), ("-1", None)],
)
def test_counts_have_human_forms(text: str, count: int | None) -> None:
    assert parse_count("--max-model-len", text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("1024", 1024), ("1GiB", 2**30), ("1.5GiB", 3 * 2**29), ("2GB", 2 * 10**9), ("3 MiB", 3 * 2**20)],
)
def test_bytes_have_human_forms(text: str, count: int) -> None:
    assert parse_bytes("--kv-cache-memory", text) == count


@pytest.mark.parametrize("text", ["", "0", "-5", "1e3", "k", "1.2.3", "9" * 400, "9" * 400 + ".5"])
def test_other_forms_are_refused(text: str) -> None:
    for parse in (parse_count, parse_bytes):
        with pytest.raises(ConfigError, match="--flag"):
            parse("--flag", text)


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORERUN_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert environment_keys() == ()
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert environment_keys() == ("secret",)
