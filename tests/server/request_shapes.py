"""List every place in an endpoint's body that takes a list or an object.

The places come from the OpenAPI document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

MODEL = "nowhere"  # a valid request ends with 404


@dataclass(frozen=True)
class Place:
    """A value in a body. body(text): the JSON of the smallest valid body with text as the value."""

    method: str
    path: str
    field: str
    kind: Literal["array", "object"]
    schema: dict[str, Any]
    body: Callable[[str], str]

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.field} ({self.kind})"


def places(document: dict[str, Any]) -> Iterator[Place]:
    schemas = document["components"]["schemas"]
    for path, verbs in document["paths"].items():
        for method, operation in verbs.items():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for found in _within(content["schema"], schemas, "", lambda text: text):
                    yield Place(method.upper(), path, *found)


def least(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """Return the smallest valid value of a schema."""
    schema = _resolved(schema, schemas)
    if "anyOf" in schema:
        return least(schema["anyOf"][0], schemas)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if schema.get("type") == "object":
        needed = schema.get("required", ())
        return {n: MODEL if n == "model" else _of(schema, n, schemas) for n in needed}
    if schema.get("type") == "array":
        return [least(schema["items"], schemas)] * schema.get("minItems", 0)
    if schema.get("type") == "string":
        return "x" * schema.get("minLength", 0)
    return {"integer": 0, "number": 0, "boolean": False}.get(schema.get("type", ""))


def _of(schema: dict[str, Any], name: str, schemas: dict[str, Any]) -> Any:
    return least(schema["properties"][name], schemas)


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def _within(
    schema: dict[str, Any], schemas: dict[str, Any], field: str, wrap: Callable[[str], str]
) -> Iterator[tuple[str, Any, dict[str, Any], Callable[[str], str]]]:
    schema = _resolved(schema, schemas)
    for choice in schema.get("anyOf", ()):
        yield from _within(choice, schemas, field, wrap)
    if schema.get("type") == "array":
        yield field, "array", schema, wrap
        yield from _within(schema["items"], schemas, f"{field}[]", lambda text: wrap(f"[{text}]"))
    if schema.get("type") != "object":
        return
    yield field, "object", schema, wrap
    for name, inner in schema.get("properties", {}).items():
        others = least(schema, schemas)
        others.pop(name, None)

        def around(text: str, name: str = name, others: dict[str, Any] = others) -> str:
            before = "".join(f"{json.dumps(k)}: {json.dumps(v)}, " for k, v in others.items())
            return wrap(f"{{{before}{json.dumps(name)}: {text}}}")

        yield from _within(inner, schemas, f"{field}.{name}".lstrip("."), around)
