"""A real uvicorn on a free loopback port, in a thread, in front of a fake engine in its own process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import uvicorn

from forerun.engine.client import EngineClient
from forerun.engine.config import EngineConfig
from forerun.engine.core import EngineFactory
from forerun.server.app import create_app
from forerun.server.run import bind, uvicorn_config
from forerun.server.settings import ServerSettings, WebSettings
from tests.server.fake_engine import ByteTokenizer, fake_factory

T = TypeVar("T")
START_S = 30.0


class LiveServer:
    """Use as a context manager. `client` belongs to the server's loop: reach it by `call`."""

    client: EngineClient
    url: str

    def __init__(
        self,
        settings: ServerSettings | None = None,
        factory: EngineFactory | None = None,
        tokenizer: ByteTokenizer | None = None,
        web: WebSettings | None = None,
        **config: Any,
    ) -> None:
        self._settings = settings or ServerSettings(model="fake")
        self._factory = factory or fake_factory()
        self._tokenizer = tokenizer or ByteTokenizer()
        self._web = web or WebSettings(log_level="warning")
        self._config = EngineConfig(model="fake", **config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._started.wait(START_S), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(START_S)
        assert not self._thread.is_alive(), "the server did not end"

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20.0, **options)

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(START_S)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.client = await EngineClient.start(self._config, self._factory)
        try:
            app = create_app(self.client, self._tokenizer, self._settings)
            self._server = uvicorn.Server(uvicorn_config(app, self._web))
            scheme = "http" if self._web.ssl_certfile is None else "https"
            with bind("127.0.0.1", 0) as sock:
                self.url = f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"
                serving = asyncio.create_task(self._server.serve(sockets=[sock]))
                while not self._server.started:
                    await asyncio.sleep(0.01)
                self._started.set()
                await serving
        finally:
            await self.client.stop()
