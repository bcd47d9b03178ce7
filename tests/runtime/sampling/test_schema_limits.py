"""Limits of a schema; checking them takes little time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from moeinf.runtime.sampling import schema_limits
from moeinf.runtime.sampling.schema_limits import MOST_DEPTH, BadFormat, check_schema

Schema = dict[str, Any]


def chain(length: int) -> Schema:
    """Return definitions, each of which refers to the next."""
    following = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(length - 1)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**following, f"d{length - 1}": {}}}


def nested(levels: int) -> Schema:
    schema: Schema = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


def parts(count: int) -> list[Schema]:
    return [{} for _ in range(count)]


# (the largest that passes, the smallest that fails)
BORDERS: dict[str, tuple[Schema, Schema]] = {
    "chain": (chain(250), chain(251)),
    "levels": (nested(MOST_DEPTH), nested(MOST_DEPTH + 1)),
    "definitions": tuple({"$defs": dict.fromkeys(names(n))} for n in (1000, 1001)),
    "required": tuple({"required": names(n)} for n in (2000, 2001)),
    "properties": tuple({"properties": dict.fromkeys(names(n))} for n in (2000, 2001)),
    "enum": tuple({"enum": names(n)} for n in (5000, 5001)),
    "allOf": tuple({"allOf": parts(n)} for n in (250, 251)),
    "anyOf": tuple({"anyOf": parts(n)} for n in (250, 251)),
    "oneOf": tuple({"oneOf": parts(n)} for n in (250, 251)),
    "prefixItems": tuple({"prefixItems": parts(n)} for n in (1000, 1001)),
    "patterns": tuple({"patternProperties": dict.fromkeys(names(n))} for n in (100, 101)),
    "pattern": tuple({"pattern": "a" * n} for n in (1000, 1001)),
    "bytes": tuple({"x": ["é" * 1024] * n} for n in (127, 128)),
    "values": tuple({"x": [0] * n} for n in (19_997, 19_998)),
}  # type: ignore[assignment]


@pytest.mark.parametrize("name", BORDERS)
def test_a_schema_at_a_limit_passes_and_one_beyond_does_not(name: str) -> None:
    passes, fails = BORDERS[name]
    check_schema(passes)
    with pytest.raises(BadFormat, match="at most"):
        check_schema(fails)


def test_references_may_meet_themselves() -> None:
    """A tree is the usual case; a walk stops at a visited definition."""
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/$defs/t"}}}
    check_schema({**tree, "$defs": {"t": tree, "self": {"$ref": "#/$defs/self"}}})
    check_schema({"$ref": "#/prefixItems/1", "prefixItems": [{}, {"$ref": "#/prefixItems/0"}]})
    for odd in ("https://example.com/x", "#/a~1b/" + "9" * 5000, "#/prefixItems/7", "#x", 3):
        check_schema({"$ref": odd, "prefixItems": [{}]})


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [[]] * 1_000_000},
        {"anyOf": [{"$ref": "#" + "/" * i} for i in range(240)], "x": [0] * 18_000},
        {"x": "a" * (100 << 20)},
    ],
    ids=["values", "references to the whole", "text"],
)
def test_looking_takes_no_time(schema: Schema) -> None:
    start = time.perf_counter()
    with pytest.raises(BadFormat):
        check_schema(schema)
    assert time.perf_counter() - start < 2


def test_ways_that_meet_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two references on each of 200 levels give 2^200 paths."""
    monkeypatch.setattr(schema_limits, "_MOST_WALKED", 5000)
    defs = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"not": {"$ref": f"#/$defs/d{i + 1}"}}]}
        for i in range(200)
    }
    check_schema({"$ref": "#/$defs/d0", "$defs": defs})
