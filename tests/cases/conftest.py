"""Engines and servers of the cases. After each test: nothing went wrong unseen, a plain request is answered as ever,
and nothing is held any more."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.engine.engine import Engine
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.request import SamplingParams
from forerun.server.settings import ServerSettings
from forerun.spec.config import SpeculativeConfig
from tests.cases.material import DISTINCT, LOOP_TEXT, complete
from tests.cases.served import build_served, byte_ids, use_self_draft
from tests.methods import remembers
from tests.server.live import LiveServer
from tests.tiny_engine import NGRAM, SUFFIX, Result, make_engine, run

PLAIN = (DISTINCT[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
PLAIN_LOOP_PROMPT = 5  # tokens of the loop
IDLE_PROPOSER_BYTES = 1024  # an empty table
IDLE_WITHIN_S = 2.0
POOL_TOKENS = 1024  # of a server: room for four requests of full length
LOGGERS = ("forerun", "uvicorn.error", "asyncio", "root")

SELF_LENGTH = 8
SPECS: dict[str, dict[str, Any]] = {"ngram": NGRAM, "suffix": SUFFIX}

MakeEngine = Callable[..., Engine]
Reference = Callable[..., Result]
Serve = Callable[[str], LiveServer]


class Watch(logging.Handler):
    """Keeps what is said at ERROR and above, or with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.said.append(self.format(record))


@pytest.fixture(autouse=True)
def _nothing_unforeseen() -> Iterator[None]:
    watch = Watch()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(watch)
    yield
    for logger in loggers:
        logger.removeHandler(watch)
    assert not watch.said


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_model))


@pytest.fixture(scope="session")
def ref(tiny_model: Path) -> Reference:
    """REF: what T says to one request, alone and without speculation: (prompt, seed=..., **params) -> Result."""
    engine = make_engine(tiny_model)
    known: dict[Any, Result] = {}

    def reference(prompt: list[int], params: SamplingParams | None = None, **fields: Any) -> Result:
        params = params or SamplingParams(**({"temperature": 0} | fields))
        key = (tuple(prompt), params)
        if key not in known:
            (known[key],) = run(engine, [(prompt, params)])
        return known[key]

    return reference


@pytest.fixture
def engines(tiny_model: Path, ref: Reference) -> Iterator[MakeEngine]:
    """(method, k, model=T, spec={}, **settings) -> an engine that drafts by "ngram", "suffix", "self", as `spec` says,
    or not at all. Each one is looked after when the test ends."""
    made: list[Engine] = []

    def make(
        method: str | None,
        k: int = 5,
        *,
        model: Path = tiny_model,
        spec: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Engine:
        config = spec
        if method in SPECS:
            config = SPECS[method] | {"num_speculative_tokens": k} | (spec or {})
        engine = make_engine(model, config, **settings)
        if method == "self":
            use_self_draft(engine, str(model), k)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert not engine.has_work
        assert all(group.num_used == 0 for group in engine.scheduler.pool.groups)
        if not remembers(engine.info().speculative_config):
            assert engine.proposer.state_bytes < IDLE_PROPOSER_BYTES
        (again,) = run(engine, [PLAIN])  # checks integrity at each step, and that no block is held afterwards
        if hasattr(engine.runner.target.model, "next_token"):
            assert len(again.token_ids) == PLAIN[1].max_tokens
        else:
            assert again.key == ref(*PLAIN).key


class Servers:
    """Live servers by name, each started when it is asked for first."""

    def __init__(self, model: Path, tokenizer: Tokenizer, folder: Path) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._folder = folder
        self._started: dict[str, LiveServer] = {}
        self._read: dict[str, int] = {}  # of each core's log

    def __call__(self, name: str) -> LiveServer:
        if name not in self._started:
            self._started[name] = self._start(name).__enter__()
        return self._started[name]

    def _start(self, name: str) -> LiveServer:
        parts: dict[str, Any] = {"model": str(self._model), "log": str(self._log(name))}
        spec = SPECS.get(name)
        if name == "self":
            parts["self_draft"] = SELF_LENGTH
        if name == "loop":
            parts["loop"] = LOOP_TEXT
            spec = NGRAM | {"num_speculative_tokens": 6}
        return LiveServer(
            ServerSettings(model="tiny", per_request_spec_decode_metrics="detailed"),
            partial(build_served, **parts),
            self._tokenizer,
            speculative_config=None if spec is None else SpeculativeConfig.parse(spec),
            kv_cache_memory_bytes=POOL_TOKENS * 512,  # 512 bytes a token
            max_num_seqs=16,
            max_num_batched_tokens=96,
            num_threads=1,
        )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def new_log(self, name: str) -> str:
        """What the core said since the last call."""
        text = self._log(name).read_text()
        start = self._read.get(name, 0)
        self._read[name] = len(text)
        return text[start:]

    def stop(self) -> None:
        for server in self._started.values():
            server.__exit__()


@pytest.fixture(scope="session")
def all_servers(tiny_model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tiny_model, tokenizer, tmp_path_factory.mktemp("cores"))
    yield servers
    servers.stop()


@pytest.fixture
def serve(all_servers: Servers, tokenizer: Tokenizer, ref: Reference) -> Iterator[Serve]:
    """A live server by its name: "plain", "ngram", "suffix", "self", or "loop" (ngram on a model that says LOOP_TEXT
    over and over). Each one is looked after when the test ends."""
    used: list[str] = []

    def get(name: str) -> LiveServer:
        server = all_servers(name)
        if name not in used:
            used.append(name)
        return server

    yield get
    for name in used:
        server = all_servers(name)
        assert_idle(server)
        with server.http() as http:
            assert_answers(http, name, tokenizer, ref)
        assert_idle(server)
        assert not re.search(r"ERROR|CRITICAL|WARNING|Traceback", said := all_servers.new_log(name)), said


def assert_idle(server: LiveServer, within_s: float = IDLE_WITHIN_S) -> None:
    """Blocks in use and requests come back to none, and so does what the proposer keeps."""
    deadline = time.monotonic() + within_s
    while True:
        stats = server.client.stats()
        held = (
            server.client.num_running,
            stats.num_requests_running,
            stats.num_requests_waiting,
            stats.num_blocks_used,
            stats.proposer_bytes // IDLE_PROPOSER_BYTES,
        )
        if not any(held):
            return
        assert time.monotonic() < deadline, f"still held (front, running, waiting, blocks, proposer KiB): {held}"
        time.sleep(0.01)


def assert_answers(http: httpx.Client, name: str, tokenizer: Tokenizer, ref: Reference) -> None:
    assert http.get("/health").status_code == 200
    if name != "loop":
        prompt, params = PLAIN
        answer = complete(http, prompt, max_tokens=params.max_tokens, ignore_eos=True)
        assert answer.token_ids == ref(prompt, params).token_ids
        return
    ids = byte_ids(tokenizer)
    loop = [ids[byte] for byte in LOOP_TEXT]
    answer = complete(http, loop[:PLAIN_LOOP_PROMPT], max_tokens=6)
    assert answer.token_ids == loop[PLAIN_LOOP_PROMPT : PLAIN_LOOP_PROMPT + 6]
