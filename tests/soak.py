"""Mixed traffic on a real model over HTTP, with clients that go away, requests that are wrong, and an engine that is
killed now and then in the first half. What must hold at the end:

- every answer is the text that the same request gets without speculation;
- a request fails only if the engine was killed while it ran, or before another one had come up;
- no block, request, file or process is left behind; counters agree with each other and with what clients saw;
- the memory of the front does not grow, that of an engine only as far as its caches may.

    scripts/soak [--minutes 30] [--model smollm2-135m] [--kill-every 60]

Figures on stdout, the last line is JSON; exit code 1 and a line for each fault where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

SPEC = {
    "method": ["suffix", "ngram_mod", "ngram"],
    "num_speculative_tokens": 6,
    "suffix_decoding_max_cached_requests": 1000,
    "suffix_decoding_max_cached_bytes": 8_000_000,
    "ngram_mod_pool_bytes": 1_000_000,
}
FLAGS = {
    "--max-num-seqs": "8",
    "--max-num-waiting": "64",
    "--max-model-len": "512",
    "--kv-cache-memory": "13MiB",
    "--max-body-size": "64KiB",
    "--receive-timeout": "10",
    "--send-timeout": "10",
    "--max-engine-restarts": "10000",
}
SWITCHES = ("--restart-engine", "--disable-uvicorn-access-log")
NUM_CLIENTS = 8
SAMPLE_S = 2.0
START_S = 300.0
FRONT_SLOPE_MIB = 0.5  # a minute, after the first third: what a leak of 1 kB a request would pass many times over
FRONT_NOISE_MIB = 8.0  # growth that a short run may show whatever its slope: arenas fill
CORE_GROWTH_MIB = 48.0  # of one engine from its first half minute on: its caches' bounds, and scratch memory
BAD_BODIES: list[tuple[str, bytes, int]] = [
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}', 400),
    ("/v1/completions", b'{"prompt": "a", "temperature": "hot"}', 400),
    ("/v1/completions", b'{"prompt": "a", "model": "none"}', 404),
    ("/v1/completions", b'{"prompt": [[99999999]]}', 400),
    ("/v1/completions", b'{"prompt": "' + b"word " * 10_000 + b'"}', 400),
    ("/v1/completions", b'{"prompt": "' + b"a" * 2**17 + b'"}', 413),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}', 400),
    ("/v1/chat/completions", b'{"messages": "hello"}', 400),
    ("/v1/none", b"{}", 404),
]


def request_pool() -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each kind of request; their texts are known from the run without speculation."""
    texts = [
        "The numbers from one to twenty are: one, two, three,",
        "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
        "the cat sat on the mat, " * 8,
        '{"name": "Ann", "age": 31}\n{"name": "Bob", "age": 27}\n{"name":',
        "Once upon a time",
        "x",
    ]
    pool: list[tuple[str, dict[str, Any]]] = []
    for place, text in enumerate(texts):
        for draw in ({"temperature": 0}, {"temperature": 0.8, "seed": place}):
            body = {"prompt": text, "max_tokens": 16 + 8 * place} | draw
            pool.append(("/v1/completions", body))
            chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 24} | draw
            pool.append(("/v1/chat/completions", chat))
    pool.append(("/v1/completions", {"prompt": texts[0], "max_tokens": 24, "temperature": 1, "seed": 5, "n": 3}))
    pool.append(("/v1/completions", {"prompt": texts[2], "max_tokens": 24, "temperature": 0, "logprobs": 2}))
    pool.append(("/v1/completions", {"prompt": texts[0], "max_tokens": 40, "temperature": 0, "stop": [" ten"]}))
    return pool


def texts_of(choices: Sequence[dict[str, Any]]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


@dataclass
class Seen:
    """What clients saw. All threads write to it."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    tokens: int = 0  # of complete answers
    latencies: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str) -> None:
        with self.lock:
            self.counts[kind] += 1

    def fault(self, text: str) -> None:
        with self.lock:
            self.faults.append(text)
        print(f"FAULT: {text}", flush=True)

    def answer(self, tokens: int, seconds: float) -> None:
        with self.lock:
            self.tokens += tokens
            self.latencies.append(seconds)


class Outages:
    """When the engine was down, as those who killed it saw it."""

    def __init__(self) -> None:
        self.spans: list[list[float]] = []

    def begin(self) -> None:
        self.spans.append([time.monotonic(), float("inf")])

    def end(self) -> None:
        self.spans[-1][1] = time.monotonic()

    def overlap(self, began: float) -> bool:
        """Whether it was down at any time from `began` until now."""
        return any(end >= began for _, end in self.spans)


class LostError(Exception):
    """The server said that the request failed, with or without a status."""


class Server:
    """`forerun serve` in a process of its own; its log in a file."""

    def __init__(self, model: str, log: Path, flags: Sequence[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-c", "from forerun.cli import main; main()", "serve", model]
        command += ["--host", "127.0.0.1", "--port", str(port), *chain(*FLAGS.items()), *SWITCHES, *flags]
        self.log = log
        with log.open("w") as target:
            popen = subprocess.Popen(command, stderr=target, stdout=target)
        self.process = psutil.Process(popen.pid)
        self._popen = popen
        self.url = f"http://127.0.0.1:{port}"

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120.0)

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        with self.http() as http:
            while time.monotonic() < deadline:
                if self._popen.poll() is not None:
                    break
                try:
                    if http.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
        raise RuntimeError(f"the server is not healthy:\n{self.log.read_text()[-3000:]}")

    def core(self) -> psutil.Process:
        """The engine's process."""
        for child in self.process.children():
            if any("spawn_main" in word for word in child.cmdline()):
                return child
        raise psutil.NoSuchProcess(-1)

    def figures(self) -> dict[str, float]:
        """Name, and the labels' values that tell samples apart -> value."""
        with self.http() as http:
            text = http.get("/metrics").text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                rest = "".join(f" {v}" for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name"))
                found[sample.name + rest] = sample.value
        return found

    def end(self) -> int:
        self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(60)
        finally:
            self._popen.kill()


@contextmanager
def serving(model: str, log: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    server = Server(model, log, flags)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server._popen.kill()
        server._popen.wait()


class Client(threading.Thread):
    """Sends one request after the other, of random kinds, and judges what comes back."""

    def __init__(self, number: int, server: Server, known: list[list[str]], seen: Seen, outages: Outages) -> None:
        super().__init__()
        self._random = random.Random(number)
        self._server = server
        self._pool = request_pool()
        self._known = known
        self._seen = seen
        self._outages = outages
        self.stop = threading.Event()

    def run(self) -> None:
        kinds = (self._whole, self._stream, self._gone, self._bad, self._status)
        with self._server.http() as http:
            while not self.stop.is_set():
                (kind,) = self._random.choices(kinds, (35, 30, 20, 10, 5))
                began = time.monotonic()
                try:
                    kind(http)
                    self._seen.count(kind.__name__.strip("_"))
                except LostError as error:
                    if self._outages.overlap(began):
                        self._seen.count("lost with the engine")
                        time.sleep(0.2)
                    else:
                        self._seen.fault(f"a request was lost while the engine lived: {error}")
                except Exception as error:
                    self._seen.fault(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _pick(self) -> tuple[str, dict[str, Any], list[str]]:
        place = self._random.randrange(len(self._pool))
        return *self._pool[place], self._known[place]

    def _whole(self, http: httpx.Client) -> None:
        path, body, known = self._pick()
        began = time.monotonic()
        answer = http.post(path, json=body)
        if answer.status_code != 200:
            raise LostError(answer.text[:300])
        self._judge(body, texts_of(answer.json()["choices"]), known)
        self._seen.answer(answer.json()["usage"]["completion_tokens"], time.monotonic() - began)

    def _stream(self, http: httpx.Client) -> None:
        path, body, known = self._pick()
        began = time.monotonic()
        texts, tokens = [""] * body.get("n", 1), 0
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", path, json=body) as answer:
            for chunk in self._chunks(answer):
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice.get("text", choice.get("delta", {}).get("content")) or ""
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        self._judge(body, texts, known)
        self._seen.answer(tokens, time.monotonic() - began)

    def _gone(self, http: httpx.Client) -> None:
        """Close a stream after a few chunks, or a plain request before its answer."""
        path, body, _ = self._pick()
        body = {name: value for name, value in body.items() if name != "stop"} | {"max_tokens": 200, "ignore_eos": True}
        if self._random.random() < 0.3:
            try:
                answer = http.post(path, json=body, timeout=self._random.uniform(0.01, 0.5))
            except httpx.TimeoutException:
                return
            raise LostError(f"a long answer came too early: {answer.status_code} {answer.text[:300]}")
        left = self._random.randrange(8)
        with http.stream("POST", path, json=body | {"stream": True}) as answer:
            for _ in self._chunks(answer):
                left -= 1
                if left < 0:
                    return

    def _chunks(self, answer: httpx.Response) -> Iterator[dict[str, Any]]:
        if answer.status_code != 200:
            raise LostError(answer.read().decode()[:300])
        ended = False
        for line in answer.iter_lines():
            ended = ended or line == "data: [DONE]"
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise LostError(chunk["error"]["message"])
                yield chunk
        if not ended:
            self._seen.fault("a stream ended without [DONE]")

    def _bad(self, http: httpx.Client) -> None:
        path, body, status = self._random.choice(BAD_BODIES)
        answer = http.post(path, content=body)
        if answer.status_code in (500, 503):
            raise LostError(answer.text[:300])
        if answer.status_code != status or "Traceback" in answer.text:
            self._seen.fault(f"{body[:80]!r} got {answer.status_code}: {answer.text[:300]}")

    def _status(self, http: httpx.Client) -> None:
        for path in ("/metrics", "/v1/models", "/v1/speculation"):
            if http.get(path).status_code != 200:
                self._seen.fault(f"{path} failed")

    def _judge(self, body: dict[str, Any], texts: list[str], known: list[str]) -> None:
        if texts != known:
            self._seen.fault(f"{body} gave {texts}, without speculation {known}")


class Killer(threading.Thread):
    """Kills the engine every so often, and waits until another one serves."""

    def __init__(self, server: Server, outages: Outages, seen: Seen, every_s: float) -> None:
        super().__init__()
        self._server = server
        self._outages = outages
        self._seen = seen
        self._every_s = every_s
        self.stop = threading.Event()
        self.recoveries_s: list[float] = []

    def run(self) -> None:
        while not self.stop.wait(min(self._every_s, threading.TIMEOUT_MAX)):
            core = self._server.core()
            began = time.monotonic()
            self._outages.begin()
            core.kill()
            while core.is_running() and core.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            try:
                time.sleep(0.2)  # until the front has seen it
                self._server.wait_until_healthy()
            except RuntimeError as error:
                self._seen.fault(str(error))
                return
            self._outages.end()
            self.recoveries_s.append(time.monotonic() - began)


@dataclass
class Sample:
    time_s: float
    front_mib: float
    core_pid: int
    core_mib: float


class Watcher(threading.Thread):
    """Samples memory while an engine serves: one that is loading grows."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self.stop = threading.Event()
        self.samples: list[Sample] = []

    def run(self) -> None:
        began = time.monotonic()
        with self._server.http() as http:
            while not self.stop.wait(SAMPLE_S):
                try:
                    if http.get("/health").status_code != 200:
                        continue
                    core = self._server.core()
                    core_mib = core.memory_info().rss / 2**20
                except (psutil.Error, httpx.HTTPError):  # between two engines
                    continue
                front_mib = self._server.process.memory_info().rss / 2**20
                self.samples.append(Sample(time.monotonic() - began, front_mib, core.pid, core_mib))

    def front(self) -> tuple[float, float]:
        """After the first third: MiB a minute by least squares, and MiB between the medians of its two halves."""
        late = [s for s in self.samples if s.time_s > self.samples[-1].time_s / 3]
        fit = statistics.linear_regression([s.time_s / 60 for s in late], [s.front_mib for s in late])
        half = len(late) // 2
        halves = [statistics.median(s.front_mib for s in part) for part in (late[:half], late[half:])]
        return fit.slope, halves[1] - halves[0]

    def core_growth(self) -> float:
        """Most MiB that one engine grew by after its first half minute, in which it touches its weights and blocks."""
        by_pid: dict[int, list[Sample]] = {}
        for sample in self.samples:
            by_pid.setdefault(sample.core_pid, []).append(sample)
        growths = [0.0]
        for life in by_pid.values():
            settled = [s.core_mib for s in life if s.time_s > life[0].time_s + 30]
            if settled:
                growths.append(max(settled) - settled[0])
        return max(growths)


def learn_texts(model: str, log: Path) -> list[list[str]]:
    """The text of each request of the pool, one after the other, without speculation."""
    known = []
    with serving(model, log) as server, server.http() as http:
        for path, body in request_pool():
            known.append(texts_of(http.post(path, json=body).raise_for_status().json()["choices"]))
    return known


def judge_idle(server: Server, seen: Seen) -> dict[str, float]:
    """Wait until nothing runs; what is left then is a leak. The figures at that time."""
    deadline = time.monotonic() + 30
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while True:
        found = server.figures()
        if not any(found[name] for name in names):
            return found
        if time.monotonic() > deadline:
            seen.fault(f"left behind: {[(name, found[name]) for name in names]}")
            return found
        time.sleep(0.2)


def judge_counters(found: dict[str, float], seen: Seen, num_kills: int) -> None:
    def holds(what: str, condition: bool) -> None:
        if not condition:
            seen.fault(f"counters do not agree: {what}")

    total = {name.removeprefix("vllm:").removesuffix("_total"): value for name, value in found.items()}
    accepted, drafted = total["spec_decode_num_accepted_tokens"], total["spec_decode_num_draft_tokens"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    per_position = [value for key, value in found.items() if key.startswith(name)]
    holds("accepted tokens <= drafted tokens", 0 < accepted <= drafted)
    holds("accepted tokens = sum over positions", accepted == sum(per_position))
    holds("delivered tokens <= generated tokens", seen.tokens <= total["generation_tokens"])
    holds("cached prompt tokens <= prompt tokens", total["prompt_tokens_cached"] <= total["prompt_tokens"])
    complete = found["vllm:request_success_total stop"] + found["vllm:request_success_total length"]
    holds("complete answers are counted", len(seen.latencies) <= complete)
    holds("restarts = kills", found["forerun:engine_restarts_total"] == num_kills)
    by_proposer = [value for key, value in found.items() if key.startswith("forerun:spec_decode_num_accepted_tokens_t")]
    holds("accepted tokens = sum over proposers", accepted == sum(by_proposer))


def soak(server: Server, known: list[list[str]], minutes: float, kill_every_s: float, seen: Seen) -> dict[str, Any]:
    """The traffic and what is judged of it; the figures."""
    outages = Outages()
    clients = [Client(number, server, known, seen, outages) for number in range(NUM_CLIENTS)]
    killer, watcher = Killer(server, outages, seen, kill_every_s), Watcher(server)
    for thread in (*clients, killer, watcher):
        thread.start()
    time.sleep(minutes * 30)
    killer.stop.set()  # one engine lives through the second half, so that a leak in it has time to show
    killer.join()
    time.sleep(minutes * 30)
    for client in clients:
        client.stop.set()
    for client in clients:
        client.join()
    watcher.stop.set()
    watcher.join()
    found = judge_idle(server, seen)
    judge_counters(found, seen, len(killer.recoveries_s))
    slope, growth = watcher.front()
    core_growth = watcher.core_growth()
    if slope > FRONT_SLOPE_MIB and growth > FRONT_NOISE_MIB:
        seen.fault(f"the front grew by {slope:.2f} MiB a minute")
    if core_growth > CORE_GROWTH_MIB:
        seen.fault(f"an engine grew by {core_growth:.0f} MiB")
    if (children := len(server.process.children())) > 2:  # the engine, and multiprocessing's tracker
        seen.fault(f"{children} child processes are left, expected 2")
    return {
        "minutes": minutes,
        "requests": dict(sorted(seen.counts.items())),
        "complete_answers": len(seen.latencies),
        "tokens": seen.tokens,
        "median_latency_s": round(statistics.median(seen.latencies), 2),
        "kills": len(killer.recoveries_s),
        "recovery_s": [
            round(min(killer.recoveries_s, default=0.0), 2),
            round(max(killer.recoveries_s, default=0.0), 2),
        ],
        "front_mib": round(watcher.samples[-1].front_mib, 1),
        "front_slope_mib_a_minute": round(slope, 3),
        "front_growth_mib": round(growth, 2),
        "core_growth_mib": round(core_growth, 1),
        "front_files": server.process.num_fds(),
        "acceptance_rate": round(
            found["vllm:spec_decode_num_accepted_tokens_total"] / found["vllm:spec_decode_num_draft_tokens_total"], 3
        ),
        "preemptions": found["vllm:num_preemptions_total"],
    }


def judge_end(server: Server, known: list[list[str]], seen: Seen) -> None:
    """Every text once more, and the way out."""
    with server.http() as http:
        for (path, body), texts in zip(request_pool(), known, strict=True):
            if texts_of(http.post(path, json=body).json()["choices"]) != texts:
                seen.fault(f"afterwards {body} gave another text")
    core = server.core()
    if (code := server.end()) != 0:
        seen.fault(f"the server ended with {code}")
    if core.is_running():
        seen.fault("the engine outlived the server")
    said = server.log.read_text()
    for word in ("Traceback", "unexpected error"):
        if word in said:
            seen.fault(f"the log says {word!r}: {said[said.index(word) :][:2000]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixed traffic on a real model, with faults; see the module's text.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS", help="in the first half; 0: never")
    options = parser.parse_args()
    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="forerun-soak-") as folder:
        known = learn_texts(options.model, Path(folder) / "plain.log")
        flags = ["--speculative-config", json.dumps(SPEC)]
        with serving(options.model, Path(folder) / "soak.log", flags) as server:
            report = soak(server, known, options.minutes, options.kill_every or float("inf"), seen)
            judge_end(server, known, seen)
    for name, value in report.items():
        print(f"{name:26} {value}")
    print(json.dumps(report | {"faults": len(seen.faults)}))
    sys.exit(1 if seen.faults else 0)


if __name__ == "__main__":
    main()
