"""Bytes of a request to a dict, strictly: what Python's JSON reader lets pass but JSON forbids is refused."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from forerun.errors import RequestError
from forerun.server.errors import BodyTooLargeError

MAX_BRACKETS = 2**18  # those inside of texts included; five million lists take seconds to make and to free
MAX_INT_DIGITS = 40  # a longer number is no integer that any field takes


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLargeError: it is longer than `max_bytes`; no more than that was read.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise BodyTooLargeError(f"the request body has {declared[:20]} bytes, at most {max_bytes} are accepted", "body")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLargeError(f"the request body has more than {max_bytes} bytes", "body")
        chunks.append(chunk)
    return b"".join(chunks)


def parse_body(body: bytes) -> dict[str, Any]:
    """
    Raises:
        RequestError: too many brackets, not UTF-8, not JSON, not an object, the same field twice, or a string that is
            no Unicode.
    """
    if (brackets := body.count(b"[") + body.count(b"{")) > MAX_BRACKETS:
        raise RequestError(f"the request body has {brackets} opening brackets, at most {MAX_BRACKETS} are read", "body")
    try:
        text = body.decode("utf-8")
        content = json.loads(text, parse_int=_parse_int, object_pairs_hook=_object)
        if "\\ud" in text.lower():
            refuse_surrogates(content, "")
    except UnicodeDecodeError as error:
        raise RequestError(f"the request body is not UTF-8: byte {error.start}", "body") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply", "body") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise RequestError(f"the request body is not valid JSON: {error.msg} at {place}", "body") from None
    if not isinstance(content, dict):
        raise RequestError(f"the request body must be a JSON object, got {_json_type(content)}", "body")
    return content


def refuse_surrogates(value: Any, path: str) -> None:
    """Half a surrogate pair is valid JSON and no Unicode: no tokenizer takes it."""
    if isinstance(value, str):
        if not is_unicode(value):
            raise RequestError(
                f"{path or 'a field name'} holds half of a surrogate pair, which is not text", path or None
            )
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_surrogates(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_surrogates(key, path)
            refuse_surrogates(item, f"{path}.{key}" if path else key)


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_INT_DIGITS else float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise RequestError(f"the request body gives {twice!r} twice", twice)
    return content


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
