"""Structural tags: text in which some parts, told by the tags before them, must be of a form.

Both forms that vLLM takes are read: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` and the nested
`{"format": {"type": ...}}`. They become a Lark grammar, with the inner forms as grammars of their own beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance

ANY_TEXT = r"/(.|\n)*/"


def structural_grammar(
    document: Mapping[str, Any], special_tokens: Mapping[str, int], json_options: Mapping[str, Any]
) -> str:
    """
    Args:
        special_tokens: text -> id. Where a tag's text holds one of them, that token is meant.
        json_options: of llguidance, for every schema.
    Raises:
        ValueError: a key that is missing, unknown or of a wrong type.
    """
    if "structures" in document:
        format = _from_structures(document)
    elif isinstance(document.get("format"), Mapping):
        format = document["format"]
    else:
        raise ValueError('structural_tag needs "format", or "structures" and "triggers"')
    return _Writer(special_tokens, json_options).grammar(format)


def _from_structures(document: Mapping[str, Any]) -> Mapping[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": _get(structure, "begin", str),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": _get(structure, "end", str),
        }
        for structure in _get(document, "structures", list)
    ]
    return {"type": "triggered_tags", "triggers": _get(document, "triggers", list), "tags": tags}


def _get(value: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"an object was expected, got {value!r:.80}")
    if name not in value:
        raise ValueError(f"{name!r} is missing in {dict(value)!r:.80}")
    if not isinstance(value[name], kind):
        raise ValueError(f"{name!r} is of a wrong type: {value[name]!r:.80}")
    return value[name]


class _Writer:
    """Writes rules; each method for a format returns an expression that stands for it."""

    def __init__(self, special_tokens: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self._special = special_tokens
        self._json_options = json_options
        self._split = re.compile("(" + "|".join(map(re.escape, special_tokens)) + ")") if special_tokens else None
        self._rules: list[str] = []
        self._beside: list[dict[str, Any]] = []
        self._formats: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda f: self._literal(_get(f, "value", str)),
            "json_schema": lambda f: self._schema(_get(f, "json_schema", (dict, bool))),
            "regex": lambda f: f"/{llguidance.regex_to_lark(_get(f, 'pattern', str))}/",
            "grammar": lambda f: self._grammar(_get(f, "grammar", str)),
            "any_text": lambda f: ANY_TEXT,
            "sequence": lambda f: " ".join(map(self._expression, _get(f, "elements", list))),
            "or": lambda f: self._any_of(map(self._expression, _get(f, "elements", list))),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, format: Mapping[str, Any]) -> str:
        start = f"start: {self._expression(format)}"
        lark = "\n".join(["%llguidance {}", start, *self._rules])
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._beside]})

    def _expression(self, format: Any) -> str:
        kind = _get(format, "type", str)
        if kind not in self._formats:
            raise ValueError(f"format {kind!r:.80} is not served: use {', '.join(self._formats)}")
        return f"({self._formats[kind](format)})"

    @staticmethod
    def _any_of(expressions: Any) -> str:
        return " | ".join(expressions)

    def _literal(self, text: str) -> str:
        """A text, with the special tokens that it writes out as tokens."""
        parts = self._split.split(text) if self._split else [text]
        words = [
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(words) or '""'

    def _rule(self, body: str, mark: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{mark}: {body}")
        return name

    def _grammar_beside(self, content: dict[str, Any]) -> str:
        name = f"g{len(self._beside)}"
        self._beside.append({"name": name, **content})
        return f"@{name}"

    def _schema(self, schema: Any) -> str:
        options = {"x-guidance": dict(self._json_options)} if self._json_options and isinstance(schema, dict) else {}
        return self._grammar_beside({"json_schema": schema | options if options else schema})

    def _grammar(self, text: str) -> str:
        return self._grammar_beside({"lark_grammar": llguidance.grammar_from("grammar", text)})

    def _tag(self, format: Mapping[str, Any]) -> str:
        return f"{self._literal(_get(format, 'begin', str))} {self._tag_body(format)}"

    def _tag_body(self, format: Mapping[str, Any]) -> str:
        """What follows the begin: the content and the end, which closes free text where it is first written."""
        content, end = _get(format, "content", Mapping), _get(format, "end", (str, list))
        ends = [end] if isinstance(end, str) else end
        if content.get("type") == "any_text" and any(ends):
            return f"({self._any_of(self._text_up_to(one) for one in ends)})"
        return f"{self._expression(content)} ({self._any_of(map(self._literal, ends))})"

    def _text_up_to(self, text: str) -> str:
        """Free text that ends with the first `text`."""
        words = self._literal(text).split(" ", 1) if text in self._special else []
        if words:
            return f"{ANY_TEXT} {words[0]}"  # a token, which free text does not hold
        return self._rule(f"{ANY_TEXT} {json.dumps(text, ensure_ascii=False)}", "[lazy]")

    def _triggered_tags(self, format: Mapping[str, Any]) -> str:
        by_trigger: dict[str, list[Mapping[str, Any]]] = {t: [] for t in _get(format, "triggers", list)}
        if not by_trigger or not all(isinstance(trigger, str) and trigger for trigger in by_trigger):
            raise ValueError("triggers must be texts, none of them empty")
        for tag in (tags := _get(format, "tags", list)):
            begin = _get(tag, "begin", str)
            trigger = next((t for t in by_trigger if begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"the tag {begin!r:.80} begins with none of the triggers {list(by_trigger)!r:.200}")
            by_trigger[trigger].append(tag)
        if not tags:
            raise ValueError("tags must not be empty")
        later = self._any_of(
            f"{self._text_up_to(trigger)} ({self._any_of(self._after(trigger, tag) for tag in tags)})"
            for trigger, tags in by_trigger.items()
            if tags
        )
        stops, needed = bool(format.get("stop_after_first")), bool(format.get("at_least_one"))
        first = self._any_of(map(self._tag, tags))
        if stops:
            return first if needed else f"({later}) | {ANY_TEXT}"
        return f"({first}) ({later})* {ANY_TEXT}" if needed else f"({later})* {ANY_TEXT}"

    def _after(self, trigger: str, tag: Mapping[str, Any]) -> str:
        rest = _get(tag, "begin", str)[len(trigger) :]
        return f"{self._literal(rest)} {self._tag_body(tag)}" if rest else self._tag_body(tag)

    def _tags_with_separator(self, format: Mapping[str, Any]) -> str:
        tags: Sequence[Any] = _get(format, "tags", list)
        if not tags:
            raise ValueError("tags must not be empty")
        one = self._rule(self._any_of(map(self._tag, tags)))
        separator = self._literal(_get(format, "separator", str))
        several = one if format.get("stop_after_first") else f"{one} ({separator} {one})*"
        return several if format.get("at_least_one") else f"({several})?"
