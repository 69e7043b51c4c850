"""Server-sent events, and the watch for clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from forerun.engine.client import merge
from forerun.engine.messages import RequestOutput
from forerun.server.answers import Answer
from forerun.server.errors import describe

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


class ClientGoneError(Exception):
    """The client closed the connection: nobody is there to be answered."""


async def unless_gone(receive: Callable[[], Awaitable[Message]], work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as the client goes away. The body has been read before.

    Raises:
        ClientGoneError: the client went away first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer as a stream, one event an output. Closes `outputs` whatever happens, which aborts what still runs.

    Args:
        answer: how the job is answered.
        first: the first of the outputs; taken before, so that what is wrong from the start gets its HTTP status.
        outputs: the others.
    """

    def __init__(self, answer: Answer, first: tuple[int, RequestOutput], outputs: Outputs) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._answer = answer
        self._first = first
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._outputs):
            try:
                await unless_gone(receive, self._send_all(send))
            except ClientGoneError:
                return

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events()) as events:
            async for event in events:
                if event:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": self._answer.done})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        answer = self._answer
        try:
            yield self._encode([*answer.opening(), *answer.events(*self._first)])
            async for index, output in self._outputs:
                yield self._encode(answer.events(index, output))
            yield self._encode(answer.closing())
        except Exception as error:
            yield self._encode([describe(error)[1]])

    def _encode(self, events: list[dict[str, Any]]) -> bytes:
        return b"".join(map(self._answer.encode, events))


async def paced(outputs: Outputs, interval: int) -> Outputs:
    """The same outputs, but for the first and the last of a choice with at least `interval` tokens each."""
    held: dict[int, RequestOutput | None] = {}  # None: the first has passed, and nothing is held
    async with aclosing(outputs):
        async for index, output in outputs:
            waiting = held.get(index)
            if waiting is not None:
                merge(waiting, output)
                output = waiting
            passes = index not in held or output.finish_reason is not None or len(output.token_ids) >= interval
            held[index] = None if passes else output
            if passes:
                yield index, output
