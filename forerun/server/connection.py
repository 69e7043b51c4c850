"""One connection's limits: how many there may be, how long a request may take to arrive, and how long a reader may take
nothing. uvicorn knows none of these; its protocol does the rest."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from forerun.server.errors import RETRY_AFTER_S, error_body
from forerun.server.settings import WebSettings

MAX_HEAD_BYTES = 2**16  # request line and headers


class Connection(asyncio.Protocol):
    """Stands before uvicorn's protocol. Use `functools.partial(Connection, web)` as uvicorn's `http` class.

    - One connection above `web.max_connections` gets HTTP 503 and is closed.
    - A request, head and body, has `web.receive_timeout_s` from its first byte (the first one from the connection on),
      however it trickles: then HTTP 408. A head above `MAX_HEAD_BYTES` gets 431.
    - Where the buffers are full and the client takes nothing for `web.send_timeout_s`, the connection is cut, which
      aborts what it waits for.
    """

    def __init__(
        self,
        web: WebSettings,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._web = web
        self._connections = server_state.connections
        self._loop = _loop or asyncio.get_running_loop()
        self._http: Any = AutoHTTPProtocol(  # type: ignore[call-arg]
            config=config, server_state=server_state, app_state=app_state, _loop=_loop
        )
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._http.connection_made(transport)
        if len(self._connections) > self._web.max_connections:
            self._refuse(503, f"max_connections={self._web.max_connections} are open already: try again later")
            return
        self._receiving = self._loop.call_later(self._web.receive_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)
        if self._complete:
            self._receiving = _stop(self._receiving)
            self._head_bytes = 0
            return
        if self._receiving is None:
            self._receiving = self._loop.call_later(self._web.receive_timeout_s, self._too_slow)
        if self._head_awaited:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")

    def pause_writing(self) -> None:
        self._sending = self._loop.call_later(self._web.send_timeout_s, self._transport.abort)
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._sending = _stop(self._sending)
        self._http.resume_writing()

    def eof_received(self) -> bool | None:
        done: bool | None = self._http.eof_received()
        return done

    def connection_lost(self, error: Exception | None) -> None:
        self._receiving, self._sending = _stop(self._receiving), _stop(self._sending)
        self._http.connection_lost(error)

    @property
    def _head_awaited(self) -> bool:
        cycle = self._http.cycle
        return cycle is None or (cycle.response_complete and not cycle.more_body)

    @property
    def _complete(self) -> bool:
        cycle = self._http.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _too_slow(self) -> None:
        self._receiving = None
        self._refuse(408, f"the request did not arrive within receive_timeout={self._web.receive_timeout_s:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless an answer has begun already, and close."""
        self._receiving = _stop(self._receiving)
        if self._transport.is_closing():
            return
        if self._head_awaited or not self._http.cycle.response_started:
            self._transport.write(_plain_response(status, message))
        self._transport.close()


def _stop(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel the timer; the result stands in its place."""
    if timer is not None:
        timer.cancel()
    return None


def _plain_response(status: int, message: str) -> bytes:
    body = msgspec.json.encode(error_body(status, message))
    head = (
        f"HTTP/1.1 {status} {error_body(status, '')['error']['type']}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        f"Retry-After: {RETRY_AFTER_S}",
    )
    return "\r\n".join((*head, "", "")).encode() + body
