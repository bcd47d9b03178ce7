"""The connection between two stages: a key, then messages of bounded size.

    first                                    stage
      │ magic, nonce ───────────────────────▶  │
      │  ◀─────────────────────── magic, nonce │
      │ HMAC(key, "first", nonces) ─────────▶  │   a wrong one: it hangs up
      │  ◀───────── HMAC(key, "stage", nonces) │
      │  ◀────────────────────────────── About │   see messages.py
      │ Begin ──────────────────────────────▶  │
      │ Pass, states ───────────────────────▶  │
      │  ◀──────────────────── Reply [, states]│   …

A message is its length (4 bytes, big-endian) and MessagePack, then the states of its rows as they
are in memory. Their size follows from the message, and is checked before memory is allocated. Only
the connection is authenticated: what it carries is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from moeinf.errors import reason
from moeinf.runtime.engine.pipeline.messages import About, Begin, Pass, Reply

Message = TypeVar("Message", bound=Struct)
_MAGIC, _NONCE, _PROOF = b"moeinf-stage-02\n", 32, 32
_LENGTH = struct.Struct(">I")
_MOST_BYTES = 64 << 10  # of a message, without states
GREETING_S = 10.0  # to connect, and to prove the key
SILENCE_S = 60.0  # without a byte, after which the other side counts as hung
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}  # seconds, seconds, times


class Lost(Exception):
    """The other side has ended, hangs, or breaks the protocol. Its text is the reason."""


class Wire:
    """One end of a connection. One thread uses it. Every method raises Lost."""

    def __init__(self, end: socket.socket, silence_s: float = SILENCE_S) -> None:
        """Take a connected socket, which is closed on an error. silence_s: see SILENCE_S."""
        self._end, self.silence_s = end, silence_s
        options = {**_KEEPALIVE, "TCP_USER_TIMEOUT": int(1e3 * silence_s)}
        try:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if hasattr(socket, name):
                    end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError as error:  # some systems refuse it once the other side has hung up
            self.close()
            raise _lost(error) from error

    def prove(self, key: str | None, first: bool, seconds: float | None = None) -> None:
        """Prove the key to the other side, and have it prove it, within `seconds` or GREETING_S.

        first: whether ours is the first stage.
        """
        own = secrets.token_bytes(_NONCE)
        until = time.monotonic() + (GREETING_S if seconds is None else seconds)
        self._send(_MAGIC + own)
        theirs = self._receive(len(_MAGIC) + _NONCE, until)
        if theirs[: len(_MAGIC)] != _MAGIC:
            raise Lost("it does not speak this protocol, or has another version of it")
        other = bytes(theirs[len(_MAGIC) :])
        nonces = own + other if first else other + own

        def proof(side: bytes) -> bytes:
            return hmac.digest((key or "").encode(), side + nonces, "sha256")

        if first:
            self._send(proof(b"first"))
        found = self._receive(_PROOF, until)
        if not hmac.compare_digest(found, proof(b"stage" if first else b"first")):
            raise Lost("it has another MOEINF_STAGE_KEY")
        if not first:
            self._send(proof(b"stage"))

    def send(self, message: Struct, states: memoryview | None = None) -> None:
        """Send a message and the bytes that follow it."""
        body = msgspec.msgpack.encode(message)
        assert len(body) <= _MOST_BYTES
        self._send(_LENGTH.pack(len(body)) + body)
        if states is not None:
            self._send(states)

    def arrives(self, seconds: float) -> bool:
        """Wait until something can be received, or the time has passed."""
        self._end.settimeout(seconds)
        try:
            self._end.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            return True  # what receives it raises Lost
        return True

    def receive(self, kind: type[Message], seconds: float | None = None) -> Message:
        """Receive a message. seconds: until its first byte; None: for ever."""
        if seconds is not None and not self.arrives(seconds):
            raise Lost(f"nothing has come from it for {seconds:g} s")
        self._end.settimeout(None)
        first = bytearray(1)
        self._fill(memoryview(first), None)
        until = time.monotonic() + self.silence_s
        (size,) = _LENGTH.unpack(first + self._receive(_LENGTH.size - 1, until))
        if size > _MOST_BYTES:
            raise Lost(f"a message of {size} bytes has come from it")
        try:
            found: Message = _DECODERS[kind].decode(self._receive(size, until))
            return found
        except (ValueError, RecursionError) as error:
            raise Lost("an invalid message has come from it") from error

    def receive_into(self, states: memoryview) -> None:
        """Fill the view; each part of it must come within `silence_s`."""
        self._fill(states, self.silence_s)

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._end.close()

    def _send(self, data: bytes | memoryview) -> None:
        """Send all bytes; some of them must go within each `silence_s`."""
        view = memoryview(data)
        self._end.settimeout(self.silence_s)
        try:
            while view:
                view = view[self._end.send(view) :]
        except OSError as error:
            raise _lost(error) from error

    def _receive(self, size: int, until: float) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            view = view[self._some(view, max(1e-3, until - time.monotonic())) :]
        return data

    def _fill(self, view: memoryview, seconds: float | None) -> None:
        while view:
            view = view[self._some(view, seconds) :]

    def _some(self, view: memoryview, seconds: float | None) -> int:
        self._end.settimeout(seconds)
        try:
            count = self._end.recv_into(view)
        except OSError as error:
            raise _lost(error) from error
        if not count:
            raise Lost("it has hung up")
        return count


def _lost(error: OSError) -> Lost:
    return Lost("it does not answer" if isinstance(error, TimeoutError) else reason(error))


# Made here, not at the first use: msgspec builds the tables of a type without a lock.
_DECODERS: dict[type[Struct], Any] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (About, Begin, Pass, Reply)
}
