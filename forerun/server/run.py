"""A server process from start to end: the port, the tokenizer, the engine, the web server, and the way out."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

from forerun.engine.client import EngineClient
from forerun.engine.config import EngineConfig
from forerun.engine.core import EngineFactory, load_engine
from forerun.errors import ConfigError
from forerun.server.app import create_app
from forerun.server.connection import Connection
from forerun.server.prompts import Tokenizer
from forerun.server.settings import ServerSettings, WebSettings
from forerun.spec.batch_table import KEY as TABLE_KEY
from forerun.spec.batch_table import describe
from forerun.spec.rules import PROMISES
from forerun.version import package_version

logger = logging.getLogger("forerun.server")

BACKLOG = 2048  # connections not yet taken; uvicorn's own number
OWN_FILES = 256  # beside the connections: sockets to the core, logs, libraries
FLUSH_S = 5  # after the last answer's end: how long slow readers may take to read it
TEMPLATE_BYTES = 2**29  # most memory that a chat template may take while it runs
EXIT_ENGINE_DIED = 1
EXIT_INTERRUPTED = 130
UNHEALTHY_S = 2.0  # after the engine's end: how long clients are told of it and /health says so, before the exit


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    web: WebSettings,
    factory: EngineFactory = load_engine,
    tokenizer: Tokenizer | None = None,
) -> int:
    """Serve until a signal comes or the engine dies; the exit code.

    Args:
        tokenizer: None: that of the model.
    Raises:
        ConfigError: the port, a file or a setting cannot be used. The port is judged before anything is loaded.
    """
    allow_connections(web.max_connections)
    with listen(web) as sock:
        logger.info("forerun %s, model %s, served as %s", package_version(), config.model, ", ".join(settings.names))
        if tokenizer is None:
            from forerun.models.tokenizer import load_tokenizer

            tokenizer = loaded = load_tokenizer(config.model, config.tokenizer)
            loaded.max_template_bytes = TEMPLATE_BYTES
            if settings.chat_template is not None:
                loaded.use_chat_template(settings.chat_template)
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:  # uvloop's where it is installed
            return runner.run(_serve(sock, config, settings, web, factory, tokenizer))


@contextmanager
def listen(web: WebSettings) -> Iterator[socket.socket]:
    """A listening socket, whose file is removed at the end where it has one. Raises: as `bind`."""
    with bind(web.host, web.port) if web.uds is None else bind_unix(web.uds) as sock:
        yield sock
    if web.uds is not None:
        Path(web.uds).unlink(missing_ok=True)


def bind_unix(path: str) -> socket.socket:
    """A Unix socket that listens already, in the place of one that nobody listens on any more.

    Raises:
        ConfigError: somebody listens there, or no socket can be there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            if sock.connect_ex(path) == 0:
                raise ConfigError(f"cannot listen on uds={path}: somebody else does; try another one")
            sock.close()
            Path(path).unlink()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except ConfigError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on uds={path}: {error.strerror or error}") from None
    return sock


def allow_connections(number: int) -> None:
    """Raise this process's limit on open files to what so many connections need, as far as it may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + OWN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    if possible < needed:
        logger.warning("max_connections=%d needs %d open files, %d are allowed: raise ulimit -n", number, needed, hard)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that nobody else can take the port while the model loads; who connects before
    the web server runs waits for it.

    Raises:
        ConfigError: in use, not allowed, or no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} is no address: {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; try another --port") from None
    return sock


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which end the process before the engine is stopped."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Where it has to hurry uvicorn leaves the app's own end out, which is short: its task would be cut off then,
        with a traceback."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


class Stop:
    """What signals ask for: the first an orderly end, the second an end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def __call__(self) -> None:
        (self.hurry if self.asked.is_set() else self.asked).set()


async def _serve(
    sock: socket.socket,
    config: EngineConfig,
    settings: ServerSettings,
    web: WebSettings,
    factory: EngineFactory,
    tokenizer: Tokenizer,
) -> int:
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    client = await _start(config, factory, stop)
    if client is None:
        return EXIT_INTERRUPTED
    try:
        _announce(client, settings, sock, web)
        app = create_app(client, tokenizer, settings)
        server = Server(uvicorn_config(app, web))
        await _serve_app(server, sock, client, stop, web.shutdown_timeout_s)
        return EXIT_ENGINE_DIED if client.died.is_set() else 0
    finally:
        await client.stop()


async def _start(config: EngineConfig, factory: EngineFactory, stop: Stop) -> EngineClient | None:
    """The started engine; None where a signal came first."""
    start = asyncio.create_task(EngineClient.start(config, factory))
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait({start, asked}, return_when=asyncio.FIRST_COMPLETED)
        return start.result() if start.done() else None
    finally:
        for task in (start, asked):
            task.cancel()
        await asyncio.gather(start, asked, return_exceptions=True)


def uvicorn_config(app: FastAPI, web: WebSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=web.host,
        port=web.port,
        uds=web.uds,
        http=partial(Connection, web),  # type: ignore[arg-type]  # called as its class is
        ws="none",
        log_level=web.log_level,
        access_log=web.access_log,
        root_path=web.root_path,
        server_header=False,
        timeout_keep_alive=web.keep_alive_timeout_s,
        timeout_graceful_shutdown=FLUSH_S,
        ssl_keyfile=web.ssl_keyfile,
        ssl_certfile=web.ssl_certfile,
        ssl_ca_certs=web.ssl_ca_certs,
        ssl_cert_reqs=web.ssl_cert_reqs,
    )


async def _serve_app(server: Server, sock: socket.socket, client: EngineClient, stop: Stop, timeout_s: float) -> None:
    ends = (_exit_after_death(server, client), _exit_after_signal(server, client, stop, timeout_s))
    tasks = [asyncio.create_task(end) for end in ends]
    try:
        await server.serve(sockets=[sock])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _exit_after_signal(server: Server, client: EngineClient, stop: Stop, timeout_s: float) -> None:
    """Take nothing new, while connections are still answered, until running requests have ended or had their time."""
    await stop.asked.wait()
    client.refuse("the server is shutting down: try again later")
    if client.num_running:
        logger.info("shutting down: %d requests may go on for %g s", client.num_running, timeout_s)
    deadline = time.monotonic() + timeout_s
    while client.num_running and time.monotonic() < deadline and not stop.hurry.is_set():
        await asyncio.sleep(0.02)
    if client.num_running:
        logger.warning("%d requests did not end in time", client.num_running)
        client.end_all("the server was shut down before the answer was complete")
    server.should_exit = True
    await stop.hurry.wait()
    server.force_exit = True


async def _exit_after_death(server: Server, client: EngineClient) -> None:
    await client.died.wait()
    await asyncio.sleep(UNHEALTHY_S)
    logger.error("the engine is dead: the server ends")
    server.should_exit = True


def _announce(client: EngineClient, settings: ServerSettings, sock: socket.socket, web: WebSettings) -> None:
    for line in client.info.log_lines:
        level = logging.WARNING if line.startswith("WARNING: ") else logging.INFO
        logger.log(level, "%s", line.removeprefix("WARNING: "))
    if client.info.speculative_config is not None:
        logger.info("Speculative config: %s", json.dumps(client.info.speculative_config))
        rule, promise = client.info.rejection_sample_method, client.info.lossless
        logger.info("Drafts are judged by %s; lossless: %s (%s)", rule, promise, PROMISES[promise])
        if table := client.info.speculative_config.get(TABLE_KEY):
            logger.info("Draft lengths by number of decoding requests: %s", describe(table))
    elif settings.per_request_spec_decode_metrics != "none":
        logger.warning("per_request_spec_decode_metrics has no effect: speculation is off")
    if web.uds is not None:
        logger.info("Starting forerun server on unix:%s", web.uds)
        return
    host = f"[{web.host}]" if ":" in web.host else web.host
    scheme = "http" if web.ssl_certfile is None else "https"
    logger.info("Starting forerun server on %s://%s:%d", scheme, host, sock.getsockname()[1])
