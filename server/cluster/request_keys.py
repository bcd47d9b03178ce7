"""Read from an HTTP request what routes it: its model, its texts and its session.

The body is untrusted. It is parsed with the server's bounds; a body that cannot be parsed is routed
by load alone, and the replica refuses it.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from moeinf.offload.replicas.route_keys import RouteKeys, route_keys
from moeinf.runtime.request_json import BadJson, parse

SESSION_HEADER = b"x-session-id"
_MOST_PIECES = 512
_MOST_SESSION = 256  # bytes
_MOST_MODEL = 256  # characters
# In the order in which a prompt has them.
_FIELDS = ("system", "instructions", "prompt", "messages", "input")
_LISTS = ("messages", "input")  # a piece per message
# These change models or memory: a second replica could do it a second time.
_CHANGES = ("/api/blobs/", "/api/copy", "/api/create", "/api/memory")
_numbers = itertools.count(secrets.randbits(48))  # differ from those of other ingress processes


def repeatable(method: str, path: str) -> bool:
    """Return whether another replica may do a request again, of which one has not told the end."""
    return method != "DELETE" and not path.startswith(_CHANGES) and not path.endswith("/cancel")


def keys_of(headers: list[tuple[bytes, bytes]], body: bytes) -> RouteKeys:
    """Return the hashes of a request; without texts for a request that has none."""
    found: Any = {}
    if body:
        try:
            found = parse(body.decode(json.detect_encoding(body), "surrogatepass"))
        except (UnicodeDecodeError, BadJson):
            found = {}
    document = found if isinstance(found, Mapping) else {}
    model = document.get("model")
    given = next((value for name, value in headers if name.lower() == SESSION_HEADER), b"")
    session = given[:_MOST_SESSION].decode("latin-1") or _session(document)
    pieces = list(itertools.islice(_pieces(document), _MOST_PIECES))
    return route_keys(
        next(_numbers), pieces, session, model[:_MOST_MODEL] if isinstance(model, str) else ""
    )


def _session(document: Mapping[str, Any]) -> str:
    """Return the key that OpenAI's clients send for a cache."""
    key = document.get("prompt_cache_key")
    return key[:_MOST_SESSION] if isinstance(key, str) else ""


def _pieces(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a prompt, message by message."""
    for name in _FIELDS:
        value = document.get(name)
        if name in _LISTS and isinstance(value, list):
            for message in value:
                if words := " ".join(_words(message)):
                    yield words
        elif words := " ".join(_words(value)):
            yield f"{name} {words}"


def _words(value: Any) -> Iterator[str]:
    """Yield the role and the texts of a message in any of the APIs' forms."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _words(part)
    elif isinstance(value, Mapping):
        for name in ("role", "content", "text", "output"):
            yield from _words(value.get(name))
