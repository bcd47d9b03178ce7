"""What stands before every request: who may ask, and how much may be sent.

Does not know endpoints. A pure ASGI layer, so that streams pass through it untouched.

A web page that a person happens to look at must not be able to talk to this server: requests with
an Origin that is not allowed are refused, and so are those whose Host is a name that somebody may
have pointed at this address (DNS rebinding). Addresses and names of this machine are fine, and so
are names that nobody can register for the world, and those of pages that may call in any case.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
from typing import Any
from urllib.parse import urlsplit

from moeinf.runtime.config import ServerSettings
from moeinf.server.http import bodies
from moeinf.server.http.refusals import (
    BodyTooLong,
    HeadersTooLong,
    InvalidApiKey,
    Refusal,
    TwoLengths,
    UnknownHost,
    UnknownOrigin,
)

HEADER_BYTES = 64 << 10  # of a request's line and headers
_LOCAL = ("localhost", "127.0.0.1", "::1")
_UNREGISTRABLE = (".localhost", ".local", ".internal")  # RFC 6761, RFC 6762, ICANN in 2024
_OPEN = ("/health", "/", "/api/version")  # answered without an API key


class Guard:
    """Wraps an ASGI app. Refusals are JSON that both kinds of clients understand."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        own = {*_LOCAL, settings.host.lower(), socket.gethostname().lower()}
        self._names = own | {_name_of(origin) for origin in settings.origins}
        self._budget = bodies.Budget()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(send, refusal)
            return
        if scope["path"].startswith("/api/"):  # what clients of Ollama call a form is JSON, too
            others = [pair for pair in scope["headers"] if pair[0].lower() != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        body = bodies.Body(receive, self._budget)
        scope = {**scope, "state": {**scope.get("state", {}), "body": body}}
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()

    def _refusal(self, scope: Any, headers: dict[str, str]) -> Refusal | None:
        size = len(scope["raw_path"] or b"") + len(scope["query_string"])
        if (
            size + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            > HEADER_BYTES
        ):
            return HeadersTooLong(f"line and headers have at most {HEADER_BYTES} bytes")
        if "transfer-encoding" in headers and "content-length" in headers:
            words = "Transfer-Encoding and Content-Length both give the body's length"
            return TwoLengths(words)
        host = _host_name(headers.get("host", ""))
        silent = not host and scope["http_version"] == "1.0"  # no browser: they all say it
        if not (silent or self._is_ours(host)):
            words = f"Host {host[:80]!r} is not known here; MOEINF_ORIGINS can name it"
            return UnknownHost(words)
        origin = headers.get("origin")
        if origin is not None and not self._may(origin):
            return UnknownOrigin(f"Origin {origin[:80]!r} is not allowed; see MOEINF_ORIGINS")
        key = self._settings.api_key
        if key is not None and scope["path"] not in _OPEN and scope["method"] != "OPTIONS":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            known = hmac.compare_digest(given.strip().encode(), key.encode())
            if not (known and scheme.lower() == "bearer"):
                words = "the API key is missing or wrong: send Authorization: Bearer KEY"
                return InvalidApiKey(words)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 20 or int(length) > bodies.MOST_BODY_BYTES:
            return BodyTooLong(f"a body has at most {bodies.MOST_BODY_BYTES} bytes")
        return None

    def _is_ours(self, host: str) -> bool:
        """A name of this machine, or any address: only names can be pointed at us by others."""
        if "*" in self._settings.origins or host.endswith(_UNREGISTRABLE):
            return True
        if host and host in self._names:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def _may(self, origin: str) -> bool:
        if "*" in self._settings.origins or origin in self._settings.origins:
            return True
        return _name_of(origin) in _LOCAL


def _host_name(text: str) -> str:
    """The Host header without its port, in lower case, as an address without brackets."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if ":" in text else text


def _name_of(origin: str) -> str:
    """The host of an origin, or of a name alone; empty where there is none."""
    try:
        return urlsplit(origin if "//" in origin else f"//{origin}").hostname or ""
    except ValueError:
        return ""


async def _refuse(send: Any, error: Refusal) -> None:
    status, body = error.http_status, json.dumps({"error": str(error), "code": error.code}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 400:  # where this request ends is unknown
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
