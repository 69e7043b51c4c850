"""`SpeculativeConfig`: what `--speculative-config` resolves to, or one line that says why it does not. No torch here.

The keys and their bounds stand in `spec/keys.py`; here are the reading of JSON and the rules between keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from forerun.spec.keys import (
    KEYS,
    METHOD_ALIASES,
    METHODS,
    NOT_METHODS,
    SERVED_METHODS,
    Key,
    Status,
    did_you_mean,
    keys_of,
    printable,
    quoted,
    refuse,
    show,
)

FLAG = "--speculative-config"
MAX_FILE_BYTES = 1 << 20
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5}'
SHORTHANDS = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}

# A dotted path as vLLM reads one: two or more identifiers, no slash and no scheme.
_DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to draft, resolved: every value is one that is served, whichever way the object was made.

    Make one with `parse`. `resolved` gives it back as a dict, and `parse` of that gives an equal object.

    Attributes:
        method: "ngram" or "suffix".
        num_speculative_tokens: K, most tokens drafted for a request in a step.
        prompt_lookup_min, prompt_lookup_max: length of the n-gram that is looked up (ngram).
        suffix_decoding_max_tree_depth: longest path in the tree, tokens (suffix).
        suffix_decoding_max_spec_factor: a match of m tokens drafts at most m times this many (suffix).
        suffix_decoding_min_token_prob: a draft ends where its estimated probability falls below this (suffix).
        suffix_decoding_max_cached_requests: finished requests that drafts may copy from: 0 (suffix).
        rejection_sample_method: "match".
        warnings: what the user should know about how it was resolved; not part of equality.

    Raises:
        ConfigError: a value that is wrong or not served.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = KEYS["prompt_lookup_min"].default
    prompt_lookup_max: int = KEYS["prompt_lookup_max"].default
    suffix_decoding_max_tree_depth: int = KEYS["suffix_decoding_max_tree_depth"].default
    suffix_decoding_max_spec_factor: float = KEYS["suffix_decoding_max_spec_factor"].default
    suffix_decoding_min_token_prob: float = KEYS["suffix_decoding_min_token_prob"].default
    suffix_decoding_max_cached_requests: int = KEYS["suffix_decoding_max_cached_requests"].default
    rejection_sample_method: str = KEYS["rejection_sample_method"].default
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.method not in SERVED_METHODS:
            refuse(f"method={show(self.method)} is not served; served: {quoted(SERVED_METHODS)}")
        for f in fields(self):
            if f.name not in ("method", "warnings"):
                object.__setattr__(self, f.name, KEYS[f.name].check(getattr(self, f.name)))
        if self.prompt_lookup_min > self.prompt_lookup_max:
            refuse(
                f"prompt_lookup_min={self.prompt_lookup_min} must not be above "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        if self.suffix_decoding_max_cached_requests > 0:
            refuse(
                f"suffix_decoding_max_cached_requests={self.suffix_decoding_max_cached_requests} is not served yet: "
                "drafts copy from the request's own tokens only; leave it out or give 0"
            )

    @classmethod
    def parse(
        cls,
        source: str | Mapping[str, Any] | SpeculativeConfig | None,
        *,
        spec_method: str | None = None,
        spec_model: str | None = None,
        spec_tokens: int | None = None,
    ) -> SpeculativeConfig:
        """Read, check and resolve a configuration.

        Args:
            source: JSON text; `@FILE`, or a name that ends in `.json`, of a file that holds it; or the object itself.
                `-` in the name of a key reads as `_`; null reads as not given.
            spec_method, spec_model, spec_tokens: shorthands for the keys `method`, `model` and
                `num_speculative_tokens`; each excludes the key in `source`.
        Raises:
            ConfigError: one line that names the key, the value, the allowed range or the position in the text, and
                the nearest valid name where something looks like a typo.
        """
        if isinstance(source, SpeculativeConfig):
            source = source.resolved()
        given = known_keys(read_object({} if source is None else source))
        for flag, value in (
            ("--spec-method", spec_method),
            ("--spec-model", spec_model),
            ("--spec-tokens", spec_tokens),
        ):
            add_shorthand(given, flag, value)
        return _resolve(given)

    def resolved(self) -> dict[str, Any]:
        """Every key that has an effect, as JSON values; `parse` reads it back."""
        leave_out = ("model", "draft_sample_method")  # no model is loaded, and drafts are one-hot anyway
        return {name: getattr(self, name) for name in keys_of(self.method) if name not in leave_out}

    def to_json(self) -> str:
        """`resolved` as one line, for logs."""
        return json.dumps(self.resolved())


def _resolve(given: dict[str, Any]) -> SpeculativeConfig:
    """From known keys to an object: method, owners of the keys, then values and defaults."""
    warnings: list[str] = []
    method = _resolve_method(given, warnings)
    for name, value in given.items():
        _check_owner(KEYS[name], value, method)
    _check_model(given.pop("model", None), method)
    given.pop("method", None)
    # Checked here too, so that a value is named as it was given, before another key takes its default from it.
    values = {name: KEYS[name].check(value) for name, value in given.items()}
    values.pop("draft_sample_method", None)
    if method == "ngram":
        _fill_ngram(values)
    else:
        _fill_suffix(values, warnings)
    return SpeculativeConfig(method=method, warnings=tuple(warnings), **values)


def _fill_ngram(values: dict[str, Any]) -> None:
    if "num_speculative_tokens" not in values:
        refuse(f'num_speculative_tokens is missing: method "ngram" needs {KEYS["num_speculative_tokens"].expected}')
    low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    values["prompt_lookup_min"] = low or high or KEYS["prompt_lookup_min"].default
    values["prompt_lookup_max"] = high or low or KEYS["prompt_lookup_max"].default


def _fill_suffix(values: dict[str, Any], warnings: list[str]) -> None:
    def value(name: str) -> Any:
        return values.get(name, KEYS[name].default)

    depth = value("suffix_decoding_max_tree_depth")
    if "num_speculative_tokens" not in values:
        values["num_speculative_tokens"] = depth
        warnings.append(f"num_speculative_tokens is not given: {depth}, the depth of the suffix tree, is taken")
    # Match and draft share a path of the tree: m tokens of match leave depth - m for the draft.
    if depth == 1 or (depth - 1) * value("suffix_decoding_max_spec_factor") + 1e-6 < 1:
        warnings.append(
            f"suffix_decoding_max_tree_depth={depth} with suffix_decoding_max_spec_factor="
            f"{value('suffix_decoding_max_spec_factor')} leaves no room for a draft: nothing will be drafted"
        )
    elif values["num_speculative_tokens"] > depth:
        warnings.append(
            f"num_speculative_tokens={values['num_speculative_tokens']} is more than "
            f"suffix_decoding_max_tree_depth={depth} lets a draft have: at most {depth - 1} tokens"
        )


def _resolve_method(given: Mapping[str, Any], warnings: list[str]) -> str:
    """The served method that `method`, or else `model`, names."""
    method = given.get("method")
    if method is None:
        return _method_of_model(given.get("model"))
    if isinstance(method, list | tuple):
        if not method:
            refuse(f"method=[] names no method; served: {quoted(SERVED_METHODS)}")
        for name in method:
            _method_name(name)
        refuse(f"method={show(method)} is not served yet: give one of {quoted(SERVED_METHODS)} alone")
    name = _method_name(method)
    if name != method:
        if METHODS[name].status is not Status.SERVED:
            refuse(f'method={show(method)} means "{name}", which {_unserved(name)}')
        warnings.append(f'method "{method}" is called "{name}" here')
    if METHODS[name].status is not Status.SERVED:
        refuse(f'method="{name}" {_unserved(name)}')
    return name


def _unserved(name: str) -> str:
    method = METHODS[name]
    yet = " yet" if method.status is Status.NOT_YET else ""
    return f"is not served{yet} ({method.why}); served: {quoted(SERVED_METHODS)}"


def _method_name(word: object) -> str:
    """A word, possibly an alias, as the name of a method that is known."""
    if not isinstance(word, str):
        refuse(f"method must be a string, one of {quoted(SERVED_METHODS)}, got {show(word)}")
    if word in METHODS:
        return word
    if word in METHOD_ALIASES:
        return METHOD_ALIASES[word]
    if word in NOT_METHODS:
        refuse(f"method={show(word)} is not served: {NOT_METHODS[word]}; served: {quoted(SERVED_METHODS)}")
    hint = did_you_mean(word, (*METHODS, *METHOD_ALIASES))
    refuse(f"method={show(word)} is unknown; served: {quoted(SERVED_METHODS)}{hint or '; known: ' + quoted(METHODS)}")


def _method_of_model(model: object) -> str:
    if model is None:
        refuse(f"method is missing; served: {quoted(SERVED_METHODS)}; for example {EXAMPLE}")
    if not isinstance(model, str):
        refuse(f"model must be a string, got {show(model)}")
    if model in ("ngram", "[ngram]"):
        return "ngram"
    if model in METHODS:
        refuse(f'model={show(model)} is the name of a method: use "method": "{model}"')
    if _DOTTED_PATH.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        refuse(f'model={show(model)} without a method means "custom_class", which {_unserved("custom_class")}')
    refuse(f'model={show(model)} without a method means "draft_model", which {_unserved("draft_model")}')


def _takes(method: str) -> str:
    names = [name for name in keys_of(method) if name not in ("method", "model", "draft_sample_method")]
    return f'method "{method}" takes {", ".join(names)}'


def _check_owner(key: Key, value: object, method: str) -> None:
    if key.methods and method not in key.methods:
        yet = "" if key.status is Status.SERVED else " and is not served yet"
        refuse(f"{key.name}={show(value)} belongs to {quoted(key.methods)}{yet}; {_takes(method)}")
    if key.status is Status.NOT_YET:
        refuse(f"{key.name}={show(value)} is not served yet ({key.why}); {_takes(method)}")


def _check_model(model: object, method: str) -> None:
    """vLLM takes the method's own word as `model` where nothing is loaded."""
    if model is None or model == method or (method == "ngram" and model == "[ngram]"):
        return
    if not isinstance(model, str):
        refuse(f"model must be a string, got {show(model)}")
    refuse(f'model={show(model)} does not go with method "{method}", which drafts without a model: leave it out')


def known_keys(given: Mapping[Any, Any]) -> dict[str, Any]:
    """The object with `-` in names read as `_` and without nulls.

    Raises:
        ConfigError: a key that is unknown, given twice, or never served.
    """
    known: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            refuse(f"a key must be a string, got {show(name)}")
        key = KEYS.get(name.replace("-", "_"))
        if key is None:
            hint = did_you_mean(name, (k.name for k in KEYS.values() if k.status is not Status.NEVER))
            if (flag := "--" + name.replace("_", "-")) in SHORTHANDS:
                hint = f'; did you mean "{SHORTHANDS[flag]}"?'
            refuse(f"unknown key {show(name)} (value {show(value)}){hint or '; `forerun config` lists the keys'}")
        if key.name in known:
            refuse(f"the key {key.name} is given twice: {show(known[key.name])} and {show(value)}")
        if key.status is Status.NEVER and value is not None:
            refuse(f"{key.name}={show(value)} is not served: {key.why}")
        known[key.name] = value
    return {name: value for name, value in known.items() if value is not None}


def add_shorthand(given: dict[str, Any], flag: str, value: object, key: str = "") -> None:
    """Put a flag's value into the object, under the flag's own key unless another is named; None: not given.

    Raises:
        ConfigError: the key is there already.
    """
    key = key or SHORTHANDS[flag]
    if value is None:
        return
    if key in given:
        refuse(f"{flag} {show(value)} and {key}={show(given[key])} are mutually exclusive: give one of them")
    given[key] = value


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


def json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of what is served. JSON cannot say it all: min <= max is a rule beside it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FLAG,
        "description": "What forerun serves now. prompt_lookup_min must not be above prompt_lookup_max.",
        "type": "object",
        "anyOf": [_schema_of(method) for method in SERVED_METHODS],
    }


def _schema_of(method: str) -> dict[str, Any]:
    properties = {name: _schema_of_key(KEYS[name], method) for name in keys_of(method)}
    names = [method, *(alias for alias, name in METHOD_ALIASES.items() if name == method)]
    properties["method"] |= {"type": "string", "enum": names}
    properties["model"] |= {"enum": [method, "[ngram]"] if method == "ngram" else [method]}
    schema: dict[str, Any] = {"title": method, "description": METHODS[method].meaning, "properties": properties}
    if method == "ngram":
        schema |= {"required": ["num_speculative_tokens"], "anyOf": [{"required": ["method"]}, {"required": ["model"]}]}
    else:
        schema |= {"required": ["method"]}
    return schema | {"additionalProperties": False}


def _schema_of_key(key: Key, method: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": key.type, "description": key.meaning}
    if key.minimum is not None:
        schema["minimum"] = key.minimum
    if key.maximum is not None:
        schema["maximum"] = key.maximum
    if key.served_values:
        schema["enum"] = list(key.served_values)
    elif key.type == "string" and key.choices:
        schema["enum"] = [choice.value for choice in key.choices if choice.status is Status.SERVED]
    if key.default is not None:
        schema["default"] = key.default
    return schema
