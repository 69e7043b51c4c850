"""The `speculative_config` of one request: fewer tokens, fewer methods, or none, a stricter rule. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from forerun.errors import RequestError
from forerun.spec.keys import METHOD_ALIASES
from forerun.spec.refusal import did_you_mean, quoted, show
from forerun.spec.rules import available_rules

FIELD = "speculative_config"
OFF = "none"
_KEYS = ("num_speculative_tokens", "method", "rejection_sample_method")


@dataclass(frozen=True)
class RequestSpeculation:
    """How a request may draft; the fields are those of `NewRequest`.

    Attributes:
        max_draft_tokens: most tokens a draft; 0: none at all; None: K of the server.
        draft_methods: the methods that may draft, in the server's order; None: all that are loaded.
        rejection_sample_method: the rule that judges its drafts; "": the server's.
    """

    max_draft_tokens: int | None = None
    draft_methods: tuple[str, ...] | None = None
    rejection_sample_method: str = ""


def request_speculation(
    given: Mapping[str, Any] | None, methods: Sequence[str], num_speculative_tokens: int, rule: str = "match"
) -> RequestSpeculation:
    """What a request's `speculative_config` asks for.

    Args:
        given: `num_speculative_tokens`, from 0 (off) to K of the server; `method`, one of the loaded ones, a list of
            them, or "none" (off); `rejection_sample_method`, the server's or one that promises more. null reads as not
            given.
        methods: the loaded methods; () without speculation, where only what switches it off is taken.
        num_speculative_tokens: K of the server.
        rule: the server's rejection_sample_method.
    Raises:
        RequestError: a key that is unknown, a value of a wrong type or above K, a method that is not loaded, a rule
            that the server was not started with and that is looser than `match` and `standard`.
    """
    given = {key: value for key, value in (given or {}).items() if value is not None}
    for key in given:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS) or f"; a request may give {quoted(_KEYS)}"
            _refuse(f"unknown key {show(key)}{hint}", str(key)[:100])
    chosen = _methods(given.get("method"), methods)
    judged_by = _rule(given.get(_KEYS[2]), rule)
    length = _length(given.get("num_speculative_tokens"), methods, num_speculative_tokens)
    if chosen == ():
        if length:
            _refuse(f'num_speculative_tokens={length} contradicts method="{OFF}": leave one out', _KEYS[0])
        return RequestSpeculation(0, None, judged_by)
    return RequestSpeculation(length, chosen, judged_by)


def _refuse(problem: str, key: str) -> NoReturn:
    raise RequestError(f"{FIELD}: {problem}", f"{FIELD}.{key}")


def _length(value: object, methods: Sequence[str], most: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(f"num_speculative_tokens must be an integer, got {show(value)}", _KEYS[0])
    if not methods and value > 0:
        _refuse(f"num_speculative_tokens={value} asks for drafts, but this server runs without speculation", _KEYS[0])
    if not 0 <= value <= most:
        _refuse(f"num_speculative_tokens must be 0 to {most}, this server's own, got {show(value)}", _KEYS[0])
    return value


def _rule(value: object, own: str) -> str:
    if value is None:
        return ""
    available = available_rules(own)
    if value not in available:
        _refuse(
            f'rejection_sample_method={show(value)} is not available on a server whose own is "{own}"; a request may '
            f"give {quoted(available)}",
            _KEYS[2],
        )
    return str(value)


def _methods(value: object, loaded: Sequence[str]) -> tuple[str, ...] | None:
    """The methods that may draft, () for none of them; None where nothing was said."""
    if value is None:
        return None
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) for word in words):
        _refuse(f"method must be the name of a method or a list of them, got {show(value)}", _KEYS[1])
    names = {METHOD_ALIASES.get(word, word) for word in words}
    if OFF in names:
        if len(names) > 1:
            _refuse(f'method={show(value)}: "{OFF}" excludes the others', _KEYS[1])
        return ()
    for word in words:
        if METHOD_ALIASES.get(word, word) not in loaded:
            there = f"loaded: {quoted(loaded)}" if loaded else "this server runs without speculation"
            _refuse(f"method {show(word)} is not loaded; {there}{did_you_mean(word, loaded)}", _KEYS[1])
    return tuple(name for name in loaded if name in names)
