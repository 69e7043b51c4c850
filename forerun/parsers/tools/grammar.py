"""The structural tag of formats that put the arguments, as JSON, between two fixed texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.parsers.tools.format import Functions


def tagged_calls(
    functions: Functions, begins: Mapping[str, str], end: str, trigger: str, *, required: bool, parallel: bool
) -> dict[str, Any]:
    """vLLM's structural tag, as xgrammar defines it: calls alone where one is required, else text that may hold them.

    Args:
        begins: of each function, what is written before its arguments.
        end: what is written after them.
        trigger: where it occurs in a text, a call has begun.
    """
    tags = [
        {"type": "tag", "begin": begins[name], "content": {"type": "json_schema", "json_schema": schema}, "end": end}
        for name, schema in functions.items()
    ]
    form: dict[str, Any]
    if required:
        form = {"type": "tags_with_separator", "tags": tags, "separator": "\n"}
    else:
        form = {"type": "triggered_tags", "triggers": [trigger], "tags": tags}
    form |= {"at_least_one": required, "stop_after_first": not parallel}
    return {"structural_tag": {"type": "structural_tag", "format": form}}
