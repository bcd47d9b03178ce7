"""Send one GET to the hub and follow its redirects by hand.

The token is sent only to the endpoint's own host. Bodies are never decompressed: a few megabytes of
gzip can become gigabytes.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import get_session
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

_Origin = tuple[str, str | None, int | None]
_MAX_HOPS = 5
MAX_BODY_BYTES = 32 << 20  # a listing of some 100,000 files
_BODY_SECONDS = 120.0
HEAD_SECONDS = 60.0  # to connect, and for the heads of all answers up to the last redirect


class BadAnswer(Exception):
    """An invalid answer that a retry would not fix. The message says what is invalid."""


class _Deadline:
    """Cuts the connections of a request if the head of its answer is late.

    The HTTP client limits the time of each read only: a head may come byte by byte, or after any
    number of `100 Continue`. Each request has a connection of its own, so that it is known here.
    """

    def __init__(self) -> None:
        self._streams = list[Any]()
        self._lock, self.passed = threading.Lock(), False
        self._timer = threading.Timer(HEAD_SECONDS, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def trace(self, event: str, about: Mapping[str, Any]) -> None:
        """Note a new connection; the HTTP client calls it with each step of a request."""
        if event not in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            return
        with self._lock:
            self._streams.append(about["return_value"])
        if self.passed:
            self._cut()

    def end(self) -> None:
        """Let the body take its time."""
        self._timer.cancel()

    def _cut(self) -> None:
        with self._lock:
            self.passed, streams = True, list(self._streams)
        for stream in streams:
            end = stream.get_extra_info("socket")
            with suppress(OSError):
                socket.socket.shutdown(end, socket.SHUT_RDWR)  # also below TLS, in another thread


@contextmanager
def get(
    url: str, headers: Mapping[str, str], endpoint: str, token: str | None, stall_seconds: float
) -> Iterator[Any]:
    """Yield the response to a GET after all redirects, before its body is read.

    Raises BadAnswer for an invalid URL or redirect, and the HTTP client's HTTPError.
    """
    try:
        home = _origin(endpoint)
    except ValueError as error:
        raise BadAnswer(f"HF_ENDPOINT: {endpoint!r} is invalid ({error})") from error
    deadline = _Deadline()
    with ExitStack() as opened:
        opened.callback(deadline.end)
        try:
            response = _last(url, headers, home, token, stall_seconds, deadline, opened)
        except (HTTPError, OSError) as error:
            if deadline.passed:
                words = f"the head of its answer takes longer than {HEAD_SECONDS:.0f} s"
                raise BadAnswer(words) from error
            raise
        deadline.end()
        yield response


def _last(
    url: str,
    headers: Mapping[str, str],
    home: _Origin,
    token: str | None,
    stall_seconds: float,
    deadline: _Deadline,
    opened: ExitStack,
) -> Any:
    """Return the response after all redirects. Raises as get. opened: closes it."""
    for _ in range(_MAX_HOPS):
        sent = {**headers, "Accept-Encoding": "identity", "Connection": "close"}
        if token is not None and _origin(url) == home:
            sent["Authorization"] = f"Bearer {token}"
        with ExitStack() as stack:
            try:
                asked = get_session().stream(
                    "GET",
                    url,
                    headers=sent,
                    follow_redirects=False,
                    timeout=stall_seconds,
                    extensions={"trace": deadline.trace},
                )
                response = stack.enter_context(asked)
            except (HTTPError, ImportError, OSError, MemoryError):
                raise
            except Exception as error:  # a URL that the HTTP client cannot use
                raise BadAnswer(f"{url[:100]!r} cannot be requested: {error}") from error
            if not response.is_redirect:
                opened.push(stack.pop_all())
                return response
            url = _target(url, response.headers.get("location"))
    raise BadAnswer(f"more than {_MAX_HOPS} redirects")


def read_body(response: Any, stop: threading.Event) -> bytes:
    """Return the body of a response, uncompressed and of bounded size. Raises BadAnswer."""
    coding = response.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise BadAnswer(f"its answer is compressed ({coding[:40]!r}), which was not requested")
    body, deadline = bytearray(), time.monotonic() + _BODY_SECONDS
    for block in response.iter_raw():
        body += block
        if len(body) > MAX_BODY_BYTES:
            raise BadAnswer(f"its answer has more than {MAX_BODY_BYTES} bytes")
        if time.monotonic() > deadline:
            raise BadAnswer(f"its answer takes longer than {_BODY_SECONDS:.0f} s")
        if stop.is_set():
            raise BadAnswer("stopped")
    return bytes(body)


def _target(url: str, location: str | None) -> str:
    """Return the target of a redirect from `url`. Raises BadAnswer."""
    if not location:
        raise BadAnswer("redirected without a Location")
    try:
        target = urljoin(url, location)
        parts, _ = urlsplit(target), _origin(target)
    except ValueError as error:
        raise BadAnswer(f"redirected to an address that is invalid: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadAnswer(f"redirected to {target[:100]!r}, which is not an http address")
    return target


def _origin(url: str) -> _Origin:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default
