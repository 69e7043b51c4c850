"""Responses of `/v1/responses` that later ones may go on from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """
    Attributes:
        response: as it was answered.
        items: the conversation up to and with its output, as items.
        num_bytes: what both come to as JSON.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """In memory, and bounded: the oldest go first. Whoever knows a response's id, which cannot be guessed, may read it.

    Args:
        max_bytes: of all responses and their conversations; 0: none is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """One that alone is larger than `max_bytes` is not kept."""
        self.drop(response["id"])
        num_bytes = len(msgspec.json.encode(response)) + len(msgspec.json.encode(items))
        self._stored[response["id"]] = StoredResponse(response, items, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        return self._stored.get(response_id)

    def drop(self, response_id: str) -> bool:
        """Whether it was there."""
        dropped = self._stored.pop(response_id, None)
        self.num_bytes -= 0 if dropped is None else dropped.num_bytes
        return dropped is not None
