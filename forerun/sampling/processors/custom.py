"""Logits processors of the user's own, registered at start (`--logits-processors`), never named by a request."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from forerun.errors import ConfigError, RequestError
from forerun.request import Request
from forerun.sampling.batch import SamplingRows
from forerun.sampling.processors.interface import LogitsProcessor, paths
from forerun.sampling.processors.places import NEGATIVE_INFINITY
from forerun.spec.proposer import Draft

logger = logging.getLogger(__name__)


class RowProcessor:
    """Base of a registered class. One object, made without arguments at start, serves all requests.

    It must be a pure function of what it is given and keep nothing between calls: rows of drafts that are rejected
    later pass through it too, in no particular order.
    """

    def asks(self, extra_args: Mapping[str, Any]) -> bool:
        """Whether a request with these `extra_args` (`vllm_xargs`; {} for none) is to pass through.

        Raises:
            RequestError, ValueError: the arguments are wrong; the request is refused with this message.
        """
        return True

    def process(self, extra_args: Mapping[str, Any], token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """The changed logits of one row; `logits` may be changed in place and returned.

        Args:
            extra_args: of the request; {} for none.
            token_ids: all tokens before the row: the prompt, the output, and drafted ones on trial.
            logits: [V] float32 on the engine's device; V may exceed the tokenizer's vocabulary.
        Returns:
            [V]: minus infinity forbids a token. Where all are forbidden, or any is NaN, the request ends with an error.
        """
        raise NotImplementedError


def load_processors(names: Sequence[str | type[RowProcessor]]) -> list[RowProcessor]:
    """Objects of the classes that `--logits-processors` names, as `module:Class`; classes may be given themselves.

    Raises:
        ConfigError: no such class, one that is no `RowProcessor`, or one that cannot be made.
    """
    processors = []
    for name in names:
        kind = _find(name) if isinstance(name, str) else name
        if not (isinstance(kind, type) and issubclass(kind, RowProcessor)):
            raise ConfigError(f"logits_processors: {name!r} is no class derived from {RowProcessor.__qualname__}")
        try:
            processors.append(kind())
        except Exception as error:
            raise ConfigError(f"logits_processors: {name!r} cannot be made: {error!r}") from error
    return processors


def _find(name: str) -> object:
    module, colon, kind = name.partition(":")
    if not (module and colon and kind):
        raise ConfigError(f"logits_processors: {name!r} must be written module:Class")
    try:
        return getattr(importlib.import_module(module), kind)
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(f"logits_processors: {name!r} cannot be imported: {error!r}") from error


class CustomProcessors(LogitsProcessor):
    """All registered classes, in the order of registration. What one of them raises ends the request, no other."""

    def __init__(self, processors: Sequence[RowProcessor]) -> None:
        self._processors = processors
        self._asked: dict[str, tuple[Request, list[RowProcessor]]] = {}
        self._failures: dict[str, str] = {}

    def start(self, request: Request) -> bool:
        extra_args = request.params.extra_args or {}
        try:
            asked = [processor for processor in self._processors if processor.asks(extra_args)]
        except ValueError as error:
            raise RequestError(f"extra_args: {error}", "extra_args") from error
        if extra_args and not asked:
            raise RequestError(
                f"extra_args (vllm_xargs) hold {', '.join(map(repr, extra_args))}, but no logits processor that takes "
                "them is registered: start the server with --logits-processors, or leave them out",
                "extra_args",
            )
        if asked:
            self._asked[request.request_id] = request, asked
        return bool(asked)

    def apply(self, logits: Tensor, rows: Sequence[SamplingRows], draft: Draft) -> None:
        for r in rows:
            request, _ = self._asked[r.request_id]
            for row, path in enumerate(paths(draft.of(r.request_id)), r.first_row):
                self._process(request, request.token_ids + path, logits[row])

    def failure(self, request_id: str) -> str | None:
        return self._failures.get(request_id)

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)
        self._failures.pop(request_id, None)

    def _process(self, request: Request, token_ids: list[int], row: Tensor) -> None:
        """Change a row in place; to minus infinity where it cannot be, which ends the request if it is ever reached."""
        for processor in self._asked[request.request_id][1]:
            name = type(processor).__name__
            try:
                row.copy_(processor.process(request.params.extra_args or {}, token_ids, row))
                if not bool(row.isnan().any()):
                    continue
                failure = f"the logits processor {name} gave NaN"
            except Exception as error:
                logger.exception("the logits processor %s failed", name)
                failure = f"the logits processor {name} failed: {type(error).__name__}"
            self._failures[request.request_id] = failure
            row.fill_(NEGATIVE_INFINITY)
            return
