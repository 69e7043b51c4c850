"""A JSON schema of what `--speculative-config` serves. No torch here."""

from __future__ import annotations

from typing import Any

from forerun.spec.batch_table import MAX_RANGES
from forerun.spec.config import MAX_METHODS
from forerun.spec.keys import KEYS, METHOD_ALIASES, METHODS, SERVED_METHODS, Key, Status, keys_of
from forerun.spec.rules import RATES
from forerun.spec.source import FLAG
from forerun.spec.spec_tree import MAX_TOKENS

_Schema = dict[str, Any]
_RULES_BESIDE = (
    "What forerun serves now. Beside it, between keys: prompt_lookup_min must not be above prompt_lookup_max, nor "
    "ngram_mod_n_min or draft_min_tokens above num_speculative_tokens; probabilistic drafts exclude match; "
    "parallel_drafting and use_heterogeneous_vocab exclude each other and all but greedy drafts; ranges of "
    "num_speculative_tokens_per_batch_size begin at 1 and do not overlap; the cache of an EAGLE head takes no type but "
    "auto; num_draft_tokens of spec_tree is at most top_k + depth * top_k^2, is num_speculative_tokens where that is "
    "given, and excludes parallel_drafting, draft_min_prob and all but greedy drafts; fly_* and synthetic_* go with "
    "the rejection_sample_method of that name, which excludes spec_tree; fly_window_size is below "
    "num_speculative_tokens; synthetic_acceptance_rates has that many entries, none above the one before, "
    "synthetic_acceptance_length is at most one more, and synthetic requires one of the two; a list has no two equal "
    "members, and each has what its method requires."
)
_REQUIRED = {
    "ngram": ["num_speculative_tokens"],
    "draft_model": ["model", "num_speculative_tokens"],
    "eagle": ["model"],
    "eagle3": ["model"],
}
_BY_MODEL = tuple(_REQUIRED)  # methods that `model` can name alone


def json_schema() -> _Schema:
    """A JSON schema (draft 2020-12). JSON cannot say it all: its description names the rules beside it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FLAG,
        "description": _RULES_BESIDE,
        "type": "object",
        "anyOf": [*(_schema_of(method) for method in SERVED_METHODS), _schema_of_list()],
    }


def _schema_of(method: str) -> _Schema:
    """One method alone."""
    schema = _head(method, _properties(method) | _whole_properties())
    if method in _BY_MODEL:
        return schema | {"required": _REQUIRED[method], "anyOf": [{"required": ["method"]}, {"required": ["model"]}]}
    return schema | {"required": ["method", *_REQUIRED.get(method, [])]}


def _schema_of_list() -> _Schema:
    """Several methods, with flat keys beside them."""
    members = [_head(method, _properties(method)) | {"required": ["method"]} for method in SERVED_METHODS]
    word = {"type": "string", "enum": [name for method in SERVED_METHODS for name in _names(method)]}
    items = {"anyOf": [word, *members]}
    flat = {key.name: _schema_of_key(key) for method in SERVED_METHODS for key in keys_of(method)}
    methods = {"type": "array", "minItems": 1, "maxItems": MAX_METHODS, "items": items}
    properties = {"method": methods} | flat | _whole_properties()
    return {"title": "several methods", "properties": properties, "required": ["method"], "additionalProperties": False}


def _head(method: str, properties: _Schema) -> _Schema:
    return {
        "title": method,
        "description": METHODS[method].meaning,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _names(method: str) -> list[str]:
    return [method, *(alias for alias, name in METHOD_ALIASES.items() if name == method)]


def _properties(method: str) -> _Schema:
    """The keys that a method takes, with those that say what holds for it anyway."""
    properties: _Schema = {"method": {"type": "string", "enum": _names(method)}}
    properties |= {key.name: _schema_of_key(key) for key in keys_of(method)}
    for key in KEYS.values():
        if key.elsewhere and not key.belongs_to(method):
            properties[key.name] = {"type": key.type, "enum": list(key.elsewhere)}
    if "model" not in properties:
        properties["model"] = {"type": "string", "enum": [method, "[ngram]"] if method == "ngram" else [method]}
    return properties


def _whole_properties() -> _Schema:
    whole = (key for key in KEYS.values() if key.whole and key.status is Status.SERVED and key.name != "method")
    return {key.name: _schema_of_key(key) for key in whole}


def _schema_of_key(key: Key) -> _Schema:
    schema: _Schema = {"type": key.type, "description": key.meaning}
    if key.name == RATES:
        entry: _Schema = {"type": "number", "minimum": 0, "maximum": 1}
        return schema | {"items": entry, "minItems": 1, "maxItems": MAX_TOKENS}
    if key.type == "array":
        entry = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 3, "maxItems": 3}
        return schema | {"items": entry, "minItems": 1, "maxItems": MAX_RANGES}
    if key.entries:
        entries = {
            name: {"type": "integer", "minimum": low, "maximum": high} for name, (low, high) in key.entries.items()
        }
        return schema | {"properties": entries, "required": list(entries), "additionalProperties": False}
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
