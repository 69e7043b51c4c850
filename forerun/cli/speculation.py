"""The speculation options of a command line, for every command that has them.

A command declares the options with the types below and hands their values to `roles_from_options`; the
main program passes its arguments through `join_dotted` first. Not for the keys themselves: see `forerun.spec`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from forerun.errors import ConfigError
from forerun.spec.config import SpeculativeConfig, add_shorthand, known_keys
from forerun.spec.keys import KEYS
from forerun.spec.refusal import refuse, show
from forerun.spec.roles import assign_roles
from forerun.spec.source import FLAG, read_object

SpeculativeConfigOption = Annotated[
    str | None,
    typer.Option(
        FLAG,
        "-sc",
        metavar="JSON",
        help="How to draft, as a JSON object or @FILE; `forerun config` lists the keys. "
        "Single keys: --speculative-config.KEY VALUE. llama.cpp's --spec-type, -md and the like are read too.",
    ),
]
SpecMethodOption = Annotated[str | None, typer.Option("--spec-method", metavar="NAME", help="Short for key method.")]
SpecModelOption = Annotated[str | None, typer.Option("--spec-model", metavar="NAME", help="Short for key model.")]
SpecTokensOption = Annotated[
    int | None, typer.Option("--spec-tokens", metavar="N", help="Short for key num_speculative_tokens.")
]
LegacyModelOption = Annotated[str | None, typer.Option("--speculative-model", hidden=True)]
LegacyTokensOption = Annotated[int | None, typer.Option("--num-speculative-tokens", hidden=True)]
BatchInvariantOption = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="The same text in any company and with any draft on a GPU too, more slowly; on a CPU it always is.",
    ),
]
SpecNotesOption = Annotated[list[str] | None, typer.Option("--spec-note", hidden=True)]  # see cli/llama_cpp.py

_DOTTED = re.compile(r"(?:--speculative-config|-sc)\.(?P<path>[^=]*)(?P<equals>=)?(?P<value>.*)", re.DOTALL)
_WHOLE = re.compile(r"(?:--speculative-config|-sc)(?:=(?P<value>.*))?", re.DOTALL)
_NUMBER = re.compile(r"-\.?\d.*")


def roles_from_options(
    model: str,
    *,
    speculative_config: str | Mapping[str, Any] | None = None,
    spec_method: str | None = None,
    spec_model: str | None = None,
    spec_tokens: int | None = None,
    speculative_model: str | None = None,
    num_speculative_tokens: int | None = None,
    notes: Sequence[str] | None = None,
) -> tuple[str, SpeculativeConfig | None, tuple[str, ...]]:
    """The model to serve, what the options resolve to (None where none of them is given; an empty string counts as
    given), and what the user should know about it, for the log.

    Args:
        model: as it was given. A speculators checkpoint drafts for the model that it names, see `assign_roles`.
        speculative_model, num_speculative_tokens: the spellings of old, taken with a warning that shows the JSON.
        notes: what `cli/llama_cpp.py` says about the flags that it translated.
    Raises:
        ConfigError: as `SpeculativeConfig.parse` and `assign_roles`; also where a key is given by two options.
    """
    options = (
        ("--spec-method", spec_method, "method"),
        ("--spec-model", spec_model, "model"),
        ("--spec-tokens", spec_tokens, "num_speculative_tokens"),
        ("--speculative-model", speculative_model, "model"),
        ("--num-speculative-tokens", num_speculative_tokens, "num_speculative_tokens"),
    )
    said = tuple(notes or ())
    given: dict[str, Any] | None = None
    if speculative_config is not None or any(value is not None for _, value, _ in options):
        given = known_keys(read_object({} if speculative_config is None else speculative_config))
        for flag, value, key in options:
            add_shorthand(given, flag, value, key)
    try:
        roles = assign_roles(model, given)
        config = None if roles.source is None else SpeculativeConfig.parse(roles.source)
    except ConfigError as error:
        if not said:
            raise
        raise ConfigError(f"{error} ({said[0]})") from None
    legacy = [flag for flag, value, _ in options[3:] if value is not None]
    if legacy:
        said += (f"{' and '.join(legacy)}: old spelling, read as {FLAG} '{json.dumps(given)}'",)
    if roles.note:
        said += (roles.note,)
    return roles.target, config, said + (config.warnings if config else ())


def join_dotted(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--speculative-config.KEY VALUE` and `-sc.KEY=VALUE` joined into one `--speculative-config`.

    They join the JSON of a whole `--speculative-config` beside them. Arguments without a dotted form come back as they
    are, as does all that follows `--`. A value is read as JSON where the key does not take a string.

    Raises:
        ConfigError: a key without a value or given twice, or JSON beside it that cannot be read.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    words, tail = list(arguments[:end]), list(arguments[end:])
    if not any(_DOTTED.fullmatch(word) for word in words):
        return words + tail
    rest: list[str] = []
    joined: dict[str, Any] = {}
    whole: list[str] = []
    words.reverse()
    while words:
        word = words.pop()
        if match := _DOTTED.fullmatch(word):
            value = match["value"] if match["equals"] else value_after(word, words)
            _put(joined, match["path"].split("."), value, word)
        elif match := _WHOLE.fullmatch(word):
            whole.append(value_after(word, words) if match["value"] is None else match["value"])
        else:
            rest.append(word)
    if len(whole) > 1:
        refuse(f"{FLAG} is given {len(whole)} times: single keys can join only one")
    if whole:
        beside = known_keys(read_object(whole[0]))
        for key in joined:
            if key in beside:
                refuse(f"the key {key} is given twice: {show(beside[key])} and {show(joined[key])}")
        joined = beside | joined
    return [*rest, FLAG, json.dumps(joined), *tail]


def value_after(word: str, words: list[str]) -> str:
    """Take the next word (the last of the reversed list) as a value, unless it is an option itself."""
    if not words or (words[-1].startswith("-") and not _NUMBER.fullmatch(words[-1])):
        refuse(f"{word} needs a value")
    return words.pop()


def _put(joined: dict[str, Any], path: list[str], text: str, word: str) -> None:
    """Set one key; further dots lead into objects."""
    top = path[0].replace("-", "_")
    value: Any = text
    if len(path) > 1 or top not in KEYS or KEYS[top].type != "string":
        value = _read_value(text)
    place = joined
    for name in [top, *path[1:]][:-1]:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            refuse(f"{word.partition('=')[0]} goes into {name}, which has the value {show(place)} already")
    name = top if len(path) == 1 else path[-1]
    if name in place:
        refuse(f"the key {'.'.join([top, *path[1:]])} is given twice: {show(place[name])} and {show(value)}")
    place[name] = value


def _read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
