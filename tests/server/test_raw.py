"""Test bytes that no client library sends: the server refuses them and stays up."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

import moeinf.server.http.bodies
import moeinf.server.serve


@pytest.fixture
def raw(address: str) -> Iterator[socket.socket]:
    """Yield a connection; check afterwards that the server still answers."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        yield sock
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


def everything(sock: socket.socket) -> bytes:
    """Receive bytes until the server closes the connection."""
    found = b""
    try:
        while piece := sock.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


HEAD = b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "bad",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # without a Host
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Name: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    ],
)
def test_what_is_no_request(bad: bytes, raw: socket.socket) -> None:
    raw.sendall(bad)
    raw.shutdown(socket.SHUT_WR)
    assert everything(raw).startswith((b"HTTP/1.1 400", b"HTTP/1.1 403"))


HELLO = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "long",
    [
        HELLO + b"X: " + b"a" * 100_000 + b"\r\n\r\n",  # complete in one read
        HELLO + b"X: " + b"a" * 100_000,
        HELLO + b"".join(b"X%d: a\r\n" % number for number in range(12_000)) + b"\r\n",
        b"GET /health?" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_headers_of_more_than_was_promised(long: bytes, raw: socket.socket) -> None:
    raw.sendall(long)
    raw.shutdown(socket.SHUT_WR)
    head, _, body = everything(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431")
    assert json.loads(body)["code"] == "headers_too_long"


def test_headers_of_what_was_promised(raw: socket.socket) -> None:
    raw.sendall(HELLO + b"Connection: close\r\nX: " + b"a" * 60_000 + b"\r\n\r\n")
    assert everything(raw).startswith(b"HTTP/1.1 200")


def test_two_lengths_of_one_body_end_the_connection(raw: socket.socket) -> None:
    """A proxy may use the other length; the remaining bytes would be a second request."""
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    raw.sendall(HEAD + lengths + smuggled)
    found = everything(raw)
    assert found.startswith(b"HTTP/1.1 400")
    assert b"two_lengths" in found
    assert found.count(b"HTTP/1.1") == 1


def test_two_requests_at_once_are_answered_in_order(raw: socket.socket) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /api/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    raw.sendall(first + last)
    found = everything(raw)
    assert found.count(b"HTTP/1.1 200 OK") == 2
    assert found.index(b'"status"') < found.index(b'"version"')


def test_a_client_that_leaves_within_its_body(raw: socket.socket) -> None:
    raw.sendall(HEAD + b'Content-Length: 1000\r\n\r\n{"model": ')


def test_slow_headers(raw: socket.socket, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(moeinf.server.serve, "HEADER_SECONDS", 0.3)
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as slow:
        start = time.monotonic()
        slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert everything(slow) == b""
        assert time.monotonic() - start < 3


def test_a_slow_body(raw: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moeinf.server.http.bodies, "BODY_SECONDS", 0.3)
    raw.sendall(HEAD + b"Content-Length: 100\r\nConnection: close\r\n\r\n{")
    assert everything(raw).startswith(b"HTTP/1.1 408")


def test_a_body_without_length_and_end(raw: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moeinf.server.http.bodies, "MOST_BODY_BYTES", 100_000)
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    raw.sendall(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 8)
    assert raw.recv(4096).startswith(b"HTTP/1.1 413")
