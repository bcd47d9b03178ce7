"""Limit the size of a JSON schema before it is compiled. A schema comes with a request.

Every limit is far above the schemas that people write. It is far below those that take the grammar
library seconds or overflow its stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeinf.errors import InvalidInput

MOST_BYTES = 256 << 10  # of text, in UTF-8: names, values and patterns
MOST_VALUES = 20_000  # objects, lists, names and values together
MOST_DEPTH = 100
MOST_CHAIN = 250  # definitions, each of which refers to the next one
MOST_PATTERNS = 100
MOST_PATTERN_CHARACTERS = 1_000
_MOST_WALKED = 10 * MOST_VALUES
MOST_ITEMS = {  # by keyword
    "$defs": 1_000,
    "definitions": 1_000,
    "properties": 2_000,
    "required": 2_000,
    "enum": 5_000,
    "prefixItems": 1_000,
    "allOf": 250,
    "anyOf": 250,
    "oneOf": 250,
}


class BadFormat(InvalidInput, ValueError):
    """An answer's format is invalid, too large or too slow."""

    code = "bad_format"
    hint = "--format json, or --format with a JSON schema"


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise BadFormat for a schema beyond the limits. Takes time linear in MOST_VALUES."""
    text_bytes = values = patterns = 0
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        values += 1
        _limit("values and names", values, MOST_VALUES)
        if isinstance(value, str):
            text_bytes += len(value.encode(errors="replace"))
            _limit("bytes", text_bytes, MOST_BYTES)
        elif isinstance(value, Mapping):
            _limit("levels", depth, MOST_DEPTH)
            for keyword, most in MOST_ITEMS.items():
                inside = value.get(keyword)
                if isinstance(inside, Mapping | list):
                    _limit(f"items in {keyword}", len(inside), most)
            found = _patterns(value)
            patterns += len(found)
            _limit("patterns", patterns, MOST_PATTERNS)
            for pattern in found:
                _limit("characters in a pattern", len(pattern), MOST_PATTERN_CHARACTERS)
            _limit("values and names", values + len(value), MOST_VALUES)
            stack += ((name, depth + 1) for name in value)
            stack += ((inside, depth + 1) for inside in value.values())
        elif isinstance(value, list):
            _limit("levels", depth, MOST_DEPTH)
            _limit("values and names", values + len(value), MOST_VALUES)
            stack += ((inside, depth + 1) for inside in value)
    _limit("definitions in a chain of $ref", _longest_chain(schema), MOST_CHAIN)


def _limit(what: str, count: int, most: int) -> None:
    if count > most:
        raise BadFormat(f"format: the schema has {count} {what} (at most {most})")


def _patterns(value: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of one schema object, without nested objects."""
    found = [value["pattern"]] if isinstance(value.get("pattern"), str) else []
    names = value.get("patternProperties")
    return [*found, *names] if isinstance(names, Mapping) else found


def _longest_chain(schema: Mapping[str, Any]) -> int:
    """Return the length of the longest path along `$ref`; a path ends at a cycle."""
    refs: dict[str, list[str]] = {}  # target -> references within it
    chain: dict[str, int] = {}  # target -> length of the longest path from it
    on_way: set[str] = set()
    root, walked = _refs_within(schema)
    todo = [*root]
    while todo:
        target = todo[-1]
        if target in chain:
            todo.pop()
        elif target not in refs:
            refs[target], more = _refs_within(_resolve(schema, target))
            walked += more
            _limit("values behind $ref", walked, _MOST_WALKED)  # definitions can be nested
            on_way.add(target)
            todo += (ref for ref in refs[target] if ref not in on_way)
        else:
            chain[target] = 1 + max((chain.get(ref, 0) for ref in refs[target]), default=0)
            on_way.discard(target)
            todo.pop()
    return max((chain[target] for target in root), default=0)


def _refs_within(value: Any) -> tuple[list[str], int]:
    """Return the `$ref` targets in a part of a schema, and the number of values visited.

    Definitions are skipped.
    """
    found: dict[str, None] = {}
    walked, stack = 0, [value]
    while stack:
        part = stack.pop()
        walked += 1
        if isinstance(part, Mapping):
            target = part.get("$ref")
            if isinstance(target, str):
                found[target] = None
            stack += (part[name] for name in part if name not in ("$defs", "definitions"))
        elif isinstance(part, list):
            stack += part
    return list(found), walked


def _resolve(schema: Mapping[str, Any], target: str) -> Any:
    """Return the part of the schema that a reference names, or None."""
    part: Any = schema
    if not target.startswith("#"):
        return None
    for step in filter(None, target[1:].split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(name)
        elif (
            isinstance(part, list) and len(name) < 6 and name.isdecimal() and int(name) < len(part)
        ):
            part = part[int(name)]
        else:
            return None
    return part
