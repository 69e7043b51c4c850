"""From exceptions to error bodies. Nothing of the machine (paths, tracebacks) gets into one."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from forerun.errors import (
    EngineDeadError,
    ModelNotFoundError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    UnavailableError,
)

logger = logging.getLogger("forerun.server")

RETRY_AFTER_S = 1
CLIENT_GONE = 499  # nobody sees it but the access log
SHOWN = (RequestError, UnavailableError, RequestTimeoutError, EngineDeadError, RequestFailedError)  # ours to tell
TYPE_NAMES = {
    400: "BadRequestError",
    404: "NotFoundError",
    CLIENT_GONE: "ClientClosedRequest",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class BodyTooLargeError(RequestError):
    """A request body above the limit: HTTP 413."""


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    name = TYPE_NAMES.get(status) or HTTPStatus(status).phrase
    shown = None if param is None else _unicode(param)
    return {"error": {"message": _unicode(message), "type": name, "param": shown, "code": status}}


def _unicode(text: str) -> str:
    """What a user sent may hold half a surrogate pair, which cannot be sent back."""
    return text.encode("utf-8", "replace").decode()


def error_response(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    return json_response(error_body(status, message, param), status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def status_of(error: Exception) -> int:
    match error:
        case ModelNotFoundError():
            return 404
        case BodyTooLargeError():
            return 413
        case RequestError():
            return 400
        case UnavailableError():
            return 503
        case RequestTimeoutError():
            return 504
    return 500


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for any exception; one that we did not foresee is logged and not shown."""
    status = status_of(error)
    if isinstance(error, SHOWN):
        return status, error_body(status, str(error), getattr(error, "param", None))
    logger.error("unexpected error while serving a request", exc_info=error)
    return status, error_body(status, "internal server error")


async def answer_error(_request: Request, error: Exception) -> Response:
    status, body = describe(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, UnavailableError) else None
    return json_response(body, status, headers)


async def answer_nobody(_request: Request, _error: Exception) -> Response:
    return error_response(CLIENT_GONE, "the client closed the connection before its request was there")


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in our own form."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(error.status_code, message, headers=dict(error.headers or {}))


def install(app: FastAPI) -> None:
    for kind in SHOWN:
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_exception_handler(HTTPException, answer_http_error)
