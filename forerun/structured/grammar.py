"""From what a request asks to a grammar in llguidance's own words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance

from forerun.structured.request import StructuredOutputs
from forerun.structured.structural_tag import structural_grammar

ANY_OBJECT = '{"type": "object"}'


def grammar_text(asked: StructuredOutputs, special_tokens: Mapping[str, int]) -> str:
    """The grammar as llguidance reads it.

    Args:
        special_tokens: text -> id of the tokens that a tag's text may mean.
    Raises:
        ValueError: what was wrong; not all that is wrong shows before it is compiled.
    """
    if asked.kind in ("json", "json_object"):
        return llguidance.LLMatcher.grammar_from_json_schema(asked.text or ANY_OBJECT, overrides=_json_options(asked))
    if asked.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(asked.text)
    if asked.kind == "structural_tag":
        return structural_grammar(json.loads(asked.text), special_tokens, _json_options(asked))
    return llguidance.grammar_from("choice" if asked.kind == "choice" else "grammar", asked.text)


def _json_options(asked: StructuredOutputs) -> Any:
    options: dict[str, Any] = {}
    if not asked.whitespace:
        options["whitespace_flexible"] = False
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return options
