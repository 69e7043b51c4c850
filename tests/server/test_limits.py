"""Slow clients, too many of them, keys, browsers, TLS, and the way out."""

from __future__ import annotations

import json
import logging
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from forerun.cli.serve import api_keys, words
from forerun.engine.config import EngineConfig
from forerun.errors import ConfigError
from forerun.server.run import bind_unix
from forerun.server.settings import ServerSettings, WebSettings
from tests.server.fake_engine import fake_factory
from tests.server.live import LiveServer
from tests.server.test_serve import ROOT, fake_server

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 500}


def connect(server: LiveServer) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)
    return sock


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    """Little patience, and room for four connections."""
    web = WebSettings(log_level="warning", max_connections=4, receive_timeout_s=0.3, send_timeout_s=0.3)
    with LiveServer(web=web, factory=fake_factory(step_s=0.001, burst=1)) as live:
        yield live


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_arrive_in_time_is_408(strict: LiveServer, begun: bytes) -> None:
    with connect(strict) as sock:
        sock.sendall(begun)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"receive_timeout=0.3" in answer


def test_a_request_that_trickles_is_408_too(strict: LiveServer) -> None:
    """The time counts from the first byte, not from the last one."""
    with connect(strict) as sock:
        began = time.monotonic()
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        sock.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() < began + 5:
            sock.sendall(b"A: b\r\n")
            try:
                answer = sock.recv(1000)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_may_stay_between_requests(strict: LiveServer) -> None:
    with strict.http() as http:
        for _ in range(2):
            assert http.get("/health").status_code == 200
            time.sleep(0.4)


def test_a_long_head_is_refused(strict: LiveServer) -> None:
    with connect(strict) as sock:
        answer = b""
        with suppress(ConnectionError):  # it is cut off while it is being sent
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 2**20)
            answer = read_all(sock)
    assert answer[:12] in (b"", b"HTTP/1.1 431", b"HTTP/1.1 400")
    strict.wait_until(lambda: not strict._server.server_state.connections)


def test_one_connection_too_many_is_503(strict: LiveServer) -> None:
    strict.wait_until(lambda: not strict._server.server_state.connections)
    others = [connect(strict) for _ in range(4)]
    try:
        strict.wait_until(lambda: len(strict._server.server_state.connections) == 4)
        with connect(strict) as sock:
            answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1\r\n" in answer
        assert "max_connections=4" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    finally:
        for other in others:
            other.close()
    strict.wait_until(lambda: not strict._server.server_state.connections)
    with strict.http() as http:
        assert http.get("/health").status_code == 200


def test_a_reader_that_takes_nothing_is_cut_off_and_its_request_ends(strict: LiveServer) -> None:
    body = json.dumps(LONG | {"n": 32, "logprobs": 20, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", int(strict.url.rpartition(":")[2])))
        stuck.sendall(head + body)
        strict.wait_until(lambda: strict.client.num_running == 32)
        strict.wait_until(lambda: not strict._server.server_state.connections, timeout_s=20)
        strict.wait_until(lambda: strict.client.num_running == 0)


FILE_LIMITS = """
import logging, resource, sys
from forerun.server.run import OWN_FILES, allow_connections
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300 + OWN_FILES))
for connections in (10, 300, 301):
    allow_connections(connections)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OWN_FILES, file=sys.stderr)
"""


def test_open_files_are_allowed_as_connections_need_them() -> None:
    said = subprocess.run([sys.executable, "-c", FILE_LIMITS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stderr.splitlines() == [
        "44",
        "300",
        "max_connections=301 needs 557 open files, 556 are allowed: raise ulimit -n",
        "300",
    ]


def test_a_request_may_take_so_long_and_no_longer() -> None:
    factory = fake_factory(step_s=0.01, burst=1)
    with LiveServer(factory=factory, request_timeout_s=0.2) as server, server.http() as http:
        whole = http.post(COMPLETIONS, json=LONG)
        assert whole.status_code == 504
        assert "request_timeout=0.2" in whole.json()["error"]["message"]
        events = http.post(COMPLETIONS, json=LONG | {"stream": True}).text.split("\n\n")
        assert len(events) > 5
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == 504
        server.wait_until(lambda: server.client.stats().num_requests_running == 0)
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}).status_code == 200
    with pytest.raises(ConfigError, match="request_timeout"):
        EngineConfig(model="m", request_timeout_s=0)


def test_a_client_that_goes_in_the_midst_of_its_body_is_no_error(
    strict: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(strict) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        strict.wait_until(lambda: bool(strict._server.server_state.tasks))
    strict.wait_until(lambda: not strict._server.server_state.tasks)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_server_that_ends_refuses_what_is_new_and_says_so() -> None:
    with fake_server() as (process, http):
        with http.stream("POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 100, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGTERM)
            process.wait_for("shutting down: 1 requests may go on for 10 s")
            refused, health = http.post(COMPLETIONS, json={"prompt": "a"}), http.get("/health")
            assert refused.status_code == health.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "shutting down" in refused.json()["error"]["message"]
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.end() == 0


def test_a_second_signal_ends_at_once() -> None:
    with fake_server() as (process, http):
        with http.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGTERM)
            process.wait_for("shutting down: 1 requests")
            process.process.send_signal(signal.SIGTERM)
            rest = "".join(lines)
        assert process.end() == 0
        assert "the server was shut down before the answer was complete" in rest
        assert "Traceback" not in "".join(process.lines)


def test_an_answer_that_outlasts_the_shutdown_timeout_is_told_so() -> None:
    with fake_server(shutdown_timeout_s=0) as (process, http):
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(http.post(COMPLETIONS, json=LONG)))
        thread.start()
        process.wait_for("Running: 1 reqs")
        process.process.send_signal(signal.SIGINT)
        thread.join(20)
        assert answers[0].status_code == 500
        assert "shut down before the answer was complete" in answers[0].json()["error"]["message"]
        assert process.end() == 0


def test_keys_come_from_the_command_line_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    for name in ("FORERUN_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert api_keys([], None) == ()
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert api_keys([], None) == ("theirs",)
    monkeypatch.setenv("FORERUN_API_KEY", "ours")
    assert api_keys([], None) == ("ours",)
    assert api_keys(["given"], str(file)) == ("given", "one", "two")
    for content in ("", "\n"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="holds no key"):
            api_keys([], str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        api_keys([], str(tmp_path / "none"))


def test_keys_are_shown_nowhere() -> None:
    settings = ServerSettings(model="m", api_keys=("secret",))
    assert "secret" not in repr(settings)
    for bad in ("sec ret", "geheim\u00fc", ""):
        with pytest.raises(ConfigError, match="api_key 2 must be printable ASCII") as refused:
            ServerSettings(model="m", api_keys=("fine", bad))
        assert not bad or bad not in str(refused.value)
    with pytest.raises(ConfigError, match="salt_by_api_key needs"):
        ServerSettings(model="m", salt_by_api_key=True)


@pytest.fixture(scope="module")
def for_browsers() -> Iterator[LiveServer]:
    settings = ServerSettings(model="fake", api_keys=("key",), allowed_origins=("https://page.example",))
    with LiveServer(settings) as live:
        yield live


def test_browsers_may_ask_where_they_are_allowed_to(for_browsers: LiveServer, http: httpx.Client) -> None:
    asking = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with for_browsers.http() as allowed:
        for client, status, origin in ((allowed, 200, "https://page.example"), (http, 405, None)):
            answer = client.options(COMPLETIONS, headers=asking)  # needs no key
            assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, origin)
        refused = allowed.get("/v1/models", headers={"Origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        other = allowed.get("/health", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("path", ["/v1/none", "/v2/none", "/inference/v1/generate", "/cohere/v2/chat"])
def test_paths_that_need_a_key_need_it_whether_or_not_they_are_served(for_browsers: LiveServer, path: str) -> None:
    with for_browsers.http() as http:
        assert http.get(path).status_code == 401
        assert http.get(path, headers={"Authorization": "Bearer key"}).status_code == 404


def test_lists_are_words_or_one_json_list() -> None:
    assert words(None, ("*",)) == ("*",)
    assert words(["a", "b"], ()) == ("a", "b")
    assert words(['["a", "b"]'], ()) == ("a", "b")
    for bad in ("[a", "[1]"):
        with pytest.raises(ConfigError, match="list"):
            words([bad], ())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a key and of a certificate that it signed itself, for localhost."""
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = str(directory / "key.pem"), str(directory / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    return key, certificate


def test_answers_come_over_tls(certificate: tuple[str, str]) -> None:
    web = WebSettings(log_level="warning", ssl_keyfile=certificate[0], ssl_certfile=certificate[1])
    with LiveServer(web=web) as server:
        with server.http(verify=ssl.create_default_context(cafile=certificate[1])) as http:
            assert server.url.startswith("https://")
            answer = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "abc"
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")


def test_tls_that_cannot_be_is_refused_before_anything_is_loaded(certificate: tuple[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(ConfigError, match="ssl_keyfile needs ssl_certfile"):
        WebSettings(ssl_keyfile=certificate[0])
    for options in ({"ssl_certfile": str(broken)}, {"ssl_certfile": str(tmp_path / "none.pem")}):
        with pytest.raises(ConfigError, match=r"TLS cannot use .*\.pem"):
            WebSettings(**options)
    with pytest.raises(ConfigError, match="ssl_cert_reqs"):
        WebSettings(ssl_certfile=certificate[1], ssl_keyfile=certificate[0], ssl_cert_reqs=3)


def test_a_unix_socket_replaces_a_dead_one_only(tmp_path: Path) -> None:
    path = str(tmp_path / "forerun.sock")
    with bind_unix(path), pytest.raises(ConfigError, match="somebody else does"):
        bind_unix(path)
    bind_unix(path).close()  # the file is there, and nobody listens
    with pytest.raises(ConfigError, match="uds="):
        bind_unix(str(tmp_path / "none" / "forerun.sock"))


def test_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "forerun.sock")
    with fake_server(uds=path) as (process, _):
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as http:
            assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3}).status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
    assert not Path(path).exists()
