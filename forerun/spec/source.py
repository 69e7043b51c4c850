"""From the text of `--speculative-config`, or the file that it names, to a JSON object. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.spec.keys import METHOD_ALIASES, METHODS
from forerun.spec.refusal import printable, refuse, show

FLAG = "--speculative-config"
MAX_FILE_BYTES = 1 << 20
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5}'


def read_object(source: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON object in a text, in the file that it names, or the mapping itself.

    Raises:
        ConfigError: not a JSON object (says where), a key given twice, or a file that cannot be read.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str):
        refuse(f"must be a JSON object such as {EXAMPLE}, got {show(source)}")
    text = source.strip()
    if not text:
        refuse(f"the text is empty: give a JSON object such as {EXAMPLE}")
    if text.startswith("@"):
        return _parse_object(_read_file(text[1:]), f"in {show(text[1:])}")
    if text.endswith(".json") and not text.startswith(("{", "[", '"')):
        return _parse_object(_read_file(text), f"in {show(text)}")
    return _parse_object(source, "")


def _read_file(name: str) -> str:
    path = Path(name)
    try:
        if not path.is_file():
            refuse(f"the file {show(name)} {'is not a file' if path.exists() else 'does not exist'}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            refuse(f"the file {show(name)} is larger than {MAX_FILE_BYTES} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        refuse(f"the file {show(name)} cannot be read: {error.strerror or type(error).__name__}")
    except ValueError:  # not UTF-8, or a name that no file can have
        refuse(f"the file {show(name)} cannot be read as UTF-8 text")


def _parse_object(text: str, where: str) -> Mapping[str, Any]:
    where = f" {where}" if where else ""
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        refuse(f"not JSON{where} {_json_problem(text, error)}")
    except (ValueError, RecursionError):  # an int of thousands of digits; thousands of brackets
        refuse(f"the JSON{where} holds a number or a nesting that is too large: {printable(text)}")
    if not isinstance(value, dict):
        hint = ""
        if isinstance(value, str) and value in (*METHODS, *METHOD_ALIASES):
            hint = f': write {{"method": {json.dumps(value)}, ...}} or --spec-method {value}'
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        refuse(f"must be a JSON object such as {EXAMPLE}, got {kind}{where}, {show(value)}{hint}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            refuse(f"the key {show(name)} is given twice: {show(found[name])} and {show(value)}")
        found[name] = value
    return found


def _json_problem(text: str, error: json.JSONDecodeError) -> str:
    """Where and why a text is no JSON, and what probably happened to it."""
    position = error.pos
    before, rest = text[:position].rstrip(), text[position:].lstrip()
    if rest.startswith(","):  # newer Pythons point at the comma itself
        after = rest[1:].lstrip()
        if after.startswith(("}", "]")):
            before, rest = before + ",", after
    elif before.endswith(",") and rest.startswith(("}", "]")):
        position = len(before) - 1
    what = error.msg[:1].lower() + error.msg[1:]
    if before.endswith(",") and rest.startswith(("}", "]")):
        what = f'comma before "{rest[0]}"'
    at = f"at character {position + 1}"
    if "\n" in text.strip():
        line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
        at = f"at line {line}, character {column}"
    found = f", found {printable(text[position : position + 20])}" if text[position:] else ", where the text ends"
    return f"{at}: {what}{found}{_json_hint(text)}"


def _json_hint(text: str) -> str:
    stripped = text.strip()
    if stripped in (*METHODS, *METHOD_ALIASES):
        return f'; write {{"method": "{stripped}", ...}} or --spec-method {stripped}'
    if not stripped.startswith(("{", "[")):
        return "; to name a file, write @FILE or a name that ends in .json"
    if '\\"' in stripped[:4]:
        return "; the quotes stand with backslashes before them: leave these out"
    if "'" in text:
        return "; JSON takes double quotes"
    if '"' not in text and re.search(r"[a-z]", text):
        return f"; the shell may have eaten the double quotes: write {FLAG} '{EXAMPLE}'"
    return ""
