"""Servers that several test modules use."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from forerun.server.settings import ServerSettings
from tests.server.fake_engine import fake_factory
from tests.server.live import LiveServer


@pytest.fixture(autouse=True)
def _nothing_unforeseen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No request of any test meets an exception that nobody foresaw."""
    yield
    assert not [r.getMessage() for r in caplog.get_records("call") if "unexpected error" in r.getMessage()]


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """With all per-request figures on, and two served names."""
    settings = ServerSettings(
        model="fake",
        served_model_names=("fake", "alias"),
        enable_per_request_metrics=True,
        per_request_spec_decode_metrics="detailed",
        max_body_bytes=200_000,
    )
    with LiveServer(settings) as live:
        yield live


@pytest.fixture(scope="session")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def slow_server() -> Iterator[LiveServer]:
    """One token in 10 ms: requests that last long enough to be interrupted."""
    with LiveServer(factory=fake_factory(step_s=0.01, burst=1)) as live:
        yield live
