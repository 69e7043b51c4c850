"""The form of an answer as a body asks for it: three ways to say it, one of which may be used."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forerun.errors import RequestError
from forerun.request import SamplingParams
from forerun.structured.request import FIELD, GUIDED, from_guided, from_response_format
from forerun.structured.trial import GrammarTrial

if TYPE_CHECKING:
    from forerun.server.models import GenerationBody

logger = logging.getLogger("forerun.server")

_warned_guided = False


def asked_form(body: GenerationBody) -> tuple[str, dict[str, Any]] | None:
    """The field that asks and what it asks, as `SamplingParams.structured_outputs`; None where any text will do.

    Raises:
        RequestError: two fields ask, or one is wrong.
    """
    guided = {name: getattr(body, name) for name in (*GUIDED, "guided_whitespace_pattern")}
    asked: dict[str, dict[str, Any] | None] = {
        "response_format": from_response_format(body.response_format) if body.response_format else None,
        FIELD: body.structured_outputs or None,
        next((name for name in GUIDED if guided[name] is not None), "guided_json"): from_guided(guided),
    }
    given = [(name, form) for name, form in asked.items() if form is not None]
    if len(given) > 1:
        raise RequestError(f"{given[0][0]} and {given[1][0]} exclude each other: send one", given[1][0])
    if given and given[0][0] in GUIDED:
        _warn_of_guided()
    return given[0] if given else None


@contextmanager
def named(field: str) -> Iterator[None]:
    """Faults of the form bear the name of the field that asked for it."""
    try:
        yield
    except RequestError as error:
        if field == FIELD or not (error.param or "").startswith(FIELD):
            raise
        raise RequestError(f"{field}: {error}", field) from None


async def check_form(trial: GrammarTrial, body: GenerationBody, params: SamplingParams) -> None:
    """
    Raises:
        RequestError: no grammar can be made of what the body or its tools ask, or none in reasonable time.
    """
    if params.structured_outputs is not None:
        field, _ = asked_form(body) or ("tools", None)
        with named(field):
            await asyncio.to_thread(trial.check, params.structured_outputs)


def _warn_of_guided() -> None:
    global _warned_guided
    if not _warned_guided:
        _warned_guided = True
        logger.warning("guided_* fields are read as structured_outputs, which replaced them in vLLM (said once)")
