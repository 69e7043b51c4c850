"""Requests with different salts share no prefix, as seen over HTTP."""

from __future__ import annotations

from typing import Any

import httpx

from tests.cases.conftest import Serve

PROMPT = [7, 11, 13, 17, 19, 23, 29, 31] * 8  # four blocks


def cached(http: httpx.Client, salt: str | None) -> int:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_only_the_same_salt_finds_the_prefix(serve: Serve) -> None:
    with serve("plain").http() as http:
        for salt in ("mine", "yours", None):
            assert cached(http, salt) == 0, "another salt's blocks were taken"
            assert cached(http, salt) > 0
