"""Send one GET to the hub and follow its redirects by hand.

The token is sent only to the endpoint's own host. Bodies are never decompressed: a few megabytes of
gzip can become gigabytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import get_session
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP client

_MAX_HOPS = 5
MAX_BODY_BYTES = 32 << 20  # a listing of some 100,000 files
_BODY_SECONDS = 120.0


class BadAnswer(Exception):
    """An invalid answer that a retry would not fix. The message says what is invalid."""


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
    for _ in range(_MAX_HOPS):
        sent = {**headers, "Accept-Encoding": "identity"}
        if token is not None and _origin(url) == home:
            sent["Authorization"] = f"Bearer {token}"
        with ExitStack() as stack:
            try:
                asked = get_session().stream(
                    "GET", url, headers=sent, follow_redirects=False, timeout=stall_seconds
                )
                response = stack.enter_context(asked)
            except (HTTPError, ImportError, OSError, MemoryError):
                raise
            except Exception as error:  # a URL that the HTTP client cannot use
                raise BadAnswer(f"{url[:100]!r} cannot be requested: {error}") from error
            if not response.is_redirect:
                yield response
                return
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


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default
