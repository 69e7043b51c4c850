"""Request bodies in the OpenAPI description. They are read by hand (`body.py`), so FastAPI does not see them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def describe_body(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`: the schema of `model`, with what it refers to written out in place."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema, definitions)}}}
    }


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
