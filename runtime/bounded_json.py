"""Parse untrusted JSON in bounded memory and in linear time."""

from __future__ import annotations

import json
from typing import Any

MOST_NODES = 4 << 20  # about 400 MB at worst; the largest tokenizer.json has 2 million


class BadJson(ValueError):
    """A text is not JSON, or needs too much memory. The message completes `<file> …`."""


def count_nodes(text: bytes) -> int:
    """Return an upper bound of the keys and values in a JSON text, without parsing it."""
    return 1 + sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))


def parse_json(text: bytes, most_nodes: int = MOST_NODES) -> Any:
    """Return the value of a JSON text whose objects have no duplicate keys. Raises BadJson."""
    nodes = count_nodes(text)
    if nodes > most_nodes:
        raise BadJson(f"has too many JSON values (up to {nodes}, at most {most_nodes})")
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except BadJson:
        raise
    except (ValueError, RecursionError) as error:
        raise BadJson(f"is not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise BadJson(f"has the duplicate key {name[:100]!r}")
        seen.add(name)
    raise AssertionError("a shorter dictionary without a duplicate key")
