"""A server process from start to end: the port, the tokenizer, the engine, the web server, and the way out."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from forerun.engine.client import EngineClient
from forerun.engine.config import EngineConfig
from forerun.engine.core import EngineFactory, load_engine
from forerun.errors import ConfigError
from forerun.server.app import create_app
from forerun.server.prompts import Tokenizer
from forerun.server.settings import ServerSettings, WebSettings
from forerun.server.system import package_version
from forerun.spec.batch_table import KEY as TABLE_KEY
from forerun.spec.batch_table import describe
from forerun.spec.rules import PROMISES

logger = logging.getLogger("forerun.server")

BACKLOG = 2048  # connections not yet taken; uvicorn's own number
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
    with bind(web.host, web.port) as sock:
        logger.info("forerun %s, model %s, served as %s", package_version(), config.model, ", ".join(settings.names))
        if tokenizer is None:
            from forerun.models.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(config.model, config.tokenizer)
        return asyncio.run(_serve(sock, config, settings, web, factory, tokenizer))


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


class Stop:
    """What a signal does: ends the start, or lets the server end, or (the second time) cuts it off."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.server: Server | None = None

    def __call__(self) -> None:
        if self.server is not None:
            self.server.force_exit = self.server.should_exit
            self.server.should_exit = True
        self.asked.set()


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
        stop.server = Server(
            uvicorn.Config(
                app,
                host=web.host,
                port=web.port,
                log_level=web.log_level,
                access_log=web.access_log,
                root_path=web.root_path,
                server_header=False,
                timeout_graceful_shutdown=web.shutdown_timeout_s,
            )
        )
        stop.server.should_exit = stop.asked.is_set()
        await _serve_app(stop.server, sock, client)
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


async def _serve_app(server: Server, sock: socket.socket, client: EngineClient) -> None:
    death = asyncio.create_task(_exit_after_death(server, client))
    try:
        await server.serve(sockets=[sock])
    finally:
        death.cancel()
        with suppress(asyncio.CancelledError):
            await death


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
    host = f"[{web.host}]" if ":" in web.host else web.host
    logger.info("Starting forerun server on http://%s:%d", host, sock.getsockname()[1])
