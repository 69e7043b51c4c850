"""What stands before every route, as plain ASGI so that streams and disconnects pass through untouched."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.errors import describe, json_response

PROTECTED = ("/v1", "/v2", "/inference", "/cohere")


class ApiKeys:
    """Lets requests for paths under `PROTECTED` pass only with one of the keys, whose digest the scope's state holds
    from then on."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _protected(scope):
            await self._app(scope, receive, send)
            return
        if (digest := self._known(Headers(scope=scope))) is not None:
            scope.setdefault("state", {})["api_key_digest"] = digest.hex()
            await self._app(scope, receive, send)
            return
        await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)

    def _known(self, headers: Headers) -> bytes | None:
        """The digest of the key that the request bears; None where it is none of ours."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key)
        # All keys are compared, each in constant time, so that time tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if any(matches) and scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _protected(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope["method"] != "OPTIONS" and any(path == top or path.startswith(f"{top}/") for top in PROTECTED)


class Unexpected:
    """The last resort: an exception nobody foresaw is logged, and answered with a body that shows nothing of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except Exception as error:
            if scope["type"] != "http":
                raise
            status, body = describe(error)
            if not started:
                await json_response(body, status)(scope, receive, send)
