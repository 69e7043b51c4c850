"""The FastAPI app: routes, what stands before them, and how errors are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from forerun.engine.client import EngineClient
from forerun.server import absent, errors, generate, responses, system
from forerun.server.job import JobMaker
from forerun.server.metrics import ServerMetrics
from forerun.server.middleware import ApiKeys, Unexpected
from forerun.server.parsing import Parsing
from forerun.server.prompts import Tokenizer
from forerun.server.response_store import ResponseStore
from forerun.server.settings import ServerSettings
from forerun.server.state import ServerState
from forerun.server.stats_log import StatsLog
from forerun.structured.trial import GrammarTrial
from forerun.version import package_version


def create_app(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """An app that serves a started engine; stopping the client is not its job. With `log_stats` it becomes the client's
    observer.

    Raises:
        ConfigError: the client has an observer already.
    """
    metrics = ServerMetrics(settings.model_name, client) if settings.log_stats else None
    if metrics is not None:
        client.observe(metrics)
    app = FastAPI(title="forerun", version=package_version(), lifespan=_lifespan)
    app.state.server = ServerState(
        client,
        tokenizer,
        settings,
        JobMaker(client.config.seed),
        GrammarTrial(tokenizer),
        Parsing(settings, tokenizer),
        ResponseStore(settings.max_stored_response_bytes),
        metrics,
        int(time.time()),
    )
    app.include_router(system.router)
    app.include_router(generate.router)
    app.include_router(responses.router)
    app.include_router(absent.router)
    errors.install(app)
    app.add_middleware(Unexpected)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:  # outermost, so that browsers can read refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: ServerState = app.state.server
    try:
        async with _stats_log(state):
            yield
    finally:
        state.grammars.close()


@asynccontextmanager
async def _stats_log(state: ServerState) -> AsyncIterator[None]:
    if state.metrics is None:
        yield
        return
    log = StatsLog(state.client, state.metrics, state.settings.log_stats_interval_s)
    task = asyncio.create_task(log.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
