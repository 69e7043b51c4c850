"""What the front owes the engine and those who read: a turn for everybody, and never a wait."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

from tests.server.fake_engine import answer_text, fake_factory
from tests.server.live import LiveServer

COMPLETIONS = "/v1/completions"
NUM_TOKENS = 400


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_an_engine_faster_than_the_front_does_not_keep_answers_back() -> None:
    """Each token is an event of its own: whoever reads gets a turn after each step, however many steps wait."""
    body = {"prompt": "hello", "max_tokens": NUM_TOKENS, "stream": True}
    answers: list[list[dict[str, Any]]] = []

    def read(server: LiveServer) -> None:
        with server.http() as http:
            answers.append(events_of(http.post(COMPLETIONS, json=body).text))

    with LiveServer(factory=fake_factory(step_s=0.0, burst=1)) as server:
        threads = [threading.Thread(target=read, args=(server,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for events in answers:
        assert "".join(event["choices"][0]["text"] for event in events) == answer_text(NUM_TOKENS)
        assert len(events) > NUM_TOKENS / 2


def test_a_reader_that_never_reads_holds_up_neither_the_engine_nor_others() -> None:
    """Its answers are some 20 MB, which neither its socket nor the server's buffers take."""
    body = json.dumps(
        {"prompt": "hello", "max_tokens": NUM_TOKENS, "n": 32, "logprobs": 20, "stream": True, "ignore_eos": True}
    ).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with LiveServer(factory=fake_factory(step_s=0.0, burst=1)) as server, socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        stuck.sendall(head + body)
        server.wait_until(lambda: server.client.stats().generation_tokens > 0)
        with server.http() as http:
            assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 20}).status_code == 200
        server.wait_until(lambda: server.client.stats().generation_tokens == 32 * NUM_TOKENS + 20, timeout_s=30)
        server.wait_until(lambda: server.client.num_running == 0)
        assert len(server._server.server_state.connections) == 1  # it is still there, with what it has not read
