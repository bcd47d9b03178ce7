"""Check every request before its endpoint: its Host, Origin and key, and its size.

This is a pure ASGI layer, so that streams pass through unchanged.

A web page in a user's browser must not reach this server. A request with an Origin that is not
allowed is refused. So is one that a browser sends for a page of another site without an Origin, as
for a picture. So is a request whose Host is a public name, since an attacker may point it at
this address (DNS rebinding). Accepted are IP addresses, names of this machine, names that no other
machine of the network can take, and the hosts of allowed origins. A server that other machines can
reach also answers to names without a dot, such as the name of its container. At an IP address the
server's own page may ask, too: an address cannot be rebound.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from moeinf.errors import MoeinfError
from moeinf.runtime.config import ServerSettings
from moeinf.server.http import bodies
from moeinf.server.http.answer_bytes import AnswerBytes
from moeinf.server.http.hosts import host_of, is_address, origin_of
from moeinf.server.http.json_text import dump
from moeinf.server.http.refusals import (
    BodiesTooLong,
    BodyTooLong,
    HeadersTooLong,
    InvalidApiKey,
    Refusal,
    TwoLengths,
    UnknownHost,
    UnknownOrigin,
)

HEADER_BYTES = 64 << 10  # of a request's line and headers
_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104  # names, not an address to bind
# Ollama's list. A browser never gives a web page one of these origins.
_APPS = ("app://*", "file://*", "tauri://*", "vscode-file://*", "vscode-webview://*")
_UNREGISTRABLE = (".localhost", ".internal")  # RFC 6761, ICANN in 2024
_OPEN = ("/health", "/", "/api/version")  # answered without an API key
_PAGE = "/page/"  # the same: files without secrets; the page itself asks for the key


class Guard:
    """Wrap an ASGI app.

    document: returns an error's JSON in the form of a scope's API. uploads: whether the app writes
    a long upload to the disk as it comes; else an upload is as short as any body.
    """

    def __init__(
        self,
        app: Any,
        settings: ServerSettings,
        document: Callable[[Mapping[str, Any], MoeinfError], dict[str, Any]],
        uploads: bool = True,
    ) -> None:
        self._app = app
        self._settings = settings
        self._document = document
        self._uploads = uploads
        self._origins = (*_APPS, *settings.origins)
        machine = socket.gethostname().lower()
        in_network = f"{machine.partition('.')[0]}.local"  # RFC 6762: others there have others
        own = {*_LOCAL, settings.host.lower(), machine, in_network}
        self._names = own | {_name_of(origin) for origin in settings.origins} - {"*"}
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
            await _refuse(send, refusal, self._document(scope, refusal))
            return
        # `curl -d` and some clients of Ollama send JSON as a form.
        others = [pair for pair in scope["headers"] if pair[0].lower() != b"content-type"]
        scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        most = self._most_bytes(scope)
        body = bodies.Body(receive, self._budget, most)
        scope = {**scope, "state": {**scope.get("state", {}), "body": body}}
        full = BodiesTooLong("the answers that wait for their readers are too long together")

        async def refuse() -> None:
            await _refuse(send, full, self._document(scope, full))

        answer = AnswerBytes(send, self._budget, refuse)
        try:
            await self._app(scope, body.receive, answer.send)
        finally:
            answer.close()
            body.close()

    def _refusal(self, scope: Any, headers: dict[str, str]) -> Refusal | None:
        size = len(scope["raw_path"] or b"") + len(scope["query_string"])
        if (
            size + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            > HEADER_BYTES
        ):
            words = f"the request line and headers must have at most {HEADER_BYTES} bytes"
            return HeadersTooLong(words)
        if "transfer-encoding" in headers and "content-length" in headers:
            words = "Transfer-Encoding and Content-Length both give the body's length"
            return TwoLengths(words)
        open_path = scope["path"] in _OPEN or scope["path"].startswith(_PAGE)
        refusal = self._foreign(scope, headers, open_path)
        if refusal is not None:
            return refusal
        key = self._settings.api_key
        if key is not None and not open_path and scope["method"] != "OPTIONS":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            bearer = given.strip() if scheme.lower() == "bearer" else ""
            both = (bearer, headers.get("x-api-key", ""))  # the second is Anthropic's
            if not any(hmac.compare_digest(one.encode(), key.encode()) for one in both):
                words = "the API key is missing or wrong: send Authorization: Bearer KEY"
                return InvalidApiKey(words)
        length = headers.get("content-length", "0")
        most = self._most_bytes(scope)
        if not length.isdecimal() or len(length) > 20 or int(length) > most:
            return BodyTooLong(f"the body must have at most {most} bytes")
        return None

    def _foreign(self, scope: Any, headers: dict[str, str], open_path: bool) -> Refusal | None:
        """Return why a request comes from a page that may not ask, or is meant for another host."""
        given, origin = headers.get("host", ""), headers.get("origin")
        silent = not given and scope["http_version"] == "1.0"  # browsers always send Host
        host = host_of(given) or ""
        if not (silent or self._is_ours(host)):
            words = f"Host {given[:80]!r} is not allowed; add it to MOEINF_ORIGINS"
            return UnknownHost(words)
        if origin is not None:
            own_page = is_address(host) and origin in _pages_at(given)
            if own_page or self._may(origin):
                return None
            return UnknownOrigin(f"Origin {origin[:80]!r} is not allowed; add it to MOEINF_ORIGINS")
        if headers.get("sec-fetch-site") == "cross-site" and not open_path:
            return UnknownOrigin("a page of another site may not ask without an Origin")
        return None

    def _most_bytes(self, scope: Any) -> int:
        if not self._uploads:
            return bodies.MOST_BODY_BYTES
        return bodies.most_bytes(scope["method"], scope["path"])

    def _is_ours(self, host: str) -> bool:
        """Return True for a name of this machine or an IP address; only names can be rebound."""
        if "*" in self._settings.origins:
            return True
        if not host:  # none, or an invalid one
            return False
        if host in self._names or host.endswith(_UNREGISTRABLE) or is_address(host):
            return True
        return "." not in host and not self._settings.on_loopback  # a container, or a near machine

    def _may(self, origin: str) -> bool:
        if "*" in self._settings.origins or (origin == "null" and origin in self._origins):
            return True
        parts = origin_of(origin)
        if parts is None:
            return False
        local = parts.scheme in ("http", "https") and parts.host in _LOCAL
        return local or origin in self._origins or f"{parts.scheme}://*" in self._origins


def _pages_at(host: str) -> tuple[str, str]:
    """Return the origins of the server's own page, which a browser has got from this Host."""
    return f"http://{host.strip()}", f"https://{host.strip()}"


def _name_of(origin: str) -> str:
    """Return the host of an origin or of a bare name; empty if it has no host."""
    try:
        return urlsplit(origin if "//" in origin else f"//{origin}").hostname or ""
    except ValueError:
        return ""


async def _refuse(send: Any, error: Refusal, document: dict[str, Any]) -> None:
    status, body = error.http_status, dump(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 400:  # the end of this request is unknown
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
