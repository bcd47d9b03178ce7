"""Define the refusals before an endpoint: hosts, origins, keys, headers, bodies, paths."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException

from moeinf.errors import InvalidInput


class Refusal(InvalidInput, HTTPException):
    """A request is refused. An HTTPException, so that FastAPI passes it on unchanged."""

    def __init__(self, words: str, headers: Mapping[str, str] | None = None) -> None:
        HTTPException.__init__(self, self.http_status, words, headers)

    def __str__(self) -> str:
        return self.detail


class UnknownHost(Refusal):
    """The Host header names neither this machine nor an allowed origin."""

    code, http_status = "unknown_host", 403


class UnknownOrigin(Refusal):
    """The Origin header is not allowed."""

    code, http_status = "unknown_origin", 403


class InvalidApiKey(Refusal):
    """The API key is missing or wrong."""

    code, http_status = "invalid_api_key", 401


class HeadersTooLong(Refusal):
    """The request's line and headers are too long."""

    code, http_status = "headers_too_long", 431


class TwoLengths(Refusal):
    """Two headers give the length of the body."""

    code = "two_lengths"


class BodyTooLong(Refusal):
    """The body is too long."""

    code, http_status = "body_too_long", 413


class BodyLate(Refusal):
    """The body does not arrive in time."""

    code, http_status = "body_late", 408


class BodiesTooLong(Refusal):
    """The bodies of all requests together are too long."""

    code, http_status = "bodies_too_long", 503


class BadBody(Refusal):
    """The body is not JSON in UTF-8, or has more values than its length allows."""

    code = "bad_body"


class UnknownPath(Refusal):
    """No endpoint has the path."""

    code, http_status = "unknown_path", 404


class WrongMethod(Refusal):
    """The path has no endpoint with the method."""

    code, http_status = "wrong_method", 405
