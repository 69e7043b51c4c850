"""What the routes share. No global state: a process may hold several apps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from fastapi import Request

from forerun.engine.client import EngineClient
from forerun.errors import ModelNotFoundError
from forerun.server.fields import shorten
from forerun.server.job import JobMaker
from forerun.server.metrics import ServerMetrics
from forerun.server.models import GenerationBody
from forerun.server.parsing import Parsing
from forerun.server.prompts import Limits, Tokenizer
from forerun.server.response_store import ResponseStore
from forerun.server.settings import ServerSettings
from forerun.structured.trial import GrammarTrial


@dataclass(frozen=True)
class ServerState:
    client: EngineClient
    tokenizer: Tokenizer
    settings: ServerSettings
    jobs: JobMaker
    grammars: GrammarTrial
    parsing: Parsing
    responses: ResponseStore
    metrics: ServerMetrics | None  # None: log_stats is off
    created: int  # when the server started, seconds since 1970

    @property
    def vocab_size(self) -> int:
        """Ids below it are tokens of the model; a tokenizer may define fewer."""
        return self.client.info.vocab_size

    @property
    def limits(self) -> Limits:
        settings = self.settings
        return Limits(
            self.client.info.max_model_len, settings.max_prompts, settings.max_messages, settings.max_text_bytes
        )

    def limits_for(self, body: GenerationBody) -> Limits:
        """A prompt that is to be cut may be as long as all prompts together."""
        limits = self.limits
        return limits if body.truncate_prompt_tokens is None else replace(limits, max_model_len=limits.max_text_bytes)

    def served_name(self, asked: str | None) -> str:
        """
        Raises:
            ModelNotFoundError: the name is not served.
        """
        names = self.settings.names
        if asked is None or asked in names:
            return asked or names[0]
        known = ", ".join(map(repr, names))
        raise ModelNotFoundError(f"the model {shorten(asked, 200)} is not served here; served: {known}", "model")


def state_of(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)
