"""Run untrusted work in a child process that has little memory and little time.

Chat templates, grammars and tokenizer files are untrusted data. The libraries that read them can
crash, hang, or use all memory. This file has both ends:

    parent: LimitedProcess.ask ── a line of JSON ──▶ serve: handler(request)
                               ◀── a line of JSON ── {"value": …} or {"error": "…"}

The child limits its own address space. The parent enforces the wall time and kills a late child.
A child that has read something large can be forked. The copy shares that memory, has its own
channel, and ends independently.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from moeinf.errors import reason
from moeinf.runtime.system import check_limits, open_process, resource

MAX_ANSWER_BYTES = 16 << 20
_START_SECONDS = 20.0
_COPY_SECONDS = 5.0
_ALARM_MARGIN_SECONDS = 4  # the child's own alarm, after the parent's deadline
_ERROR_CHARACTERS = 500
_BLOCK_BYTES = 1 << 16
_COPY = b'{"copy": true}\n'


class Refused(ValueError):
    """The child's handler rejected the request. The message is the handler's."""


class LimitExceeded(ValueError):
    """The child exceeded its time or memory, or crashed. The parent has killed it."""


class Channel:
    """The parent's end of one child. At most one request is in flight.

    kill: kills the child.
    """

    def __init__(self, channel: socket.socket, kill: Callable[[], None]) -> None:
        channel.setblocking(False)
        self._channel, self._kill = channel, kill
        self._waiting: deque[tuple[bytes, float]] = deque()  # (message, seconds), after the first
        self._unsent = b""
        self._read = bytearray()
        self._deadline = 0.0
        self._answer: dict[str, Any] | LimitExceeded | None = None
        self._asked = False
        self.closed = False

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Return the handler's value. Raises Refused, and LimitExceeded after `seconds`."""
        self.start(request, seconds)
        return self.result()

    def start(self, request: dict[str, Any], seconds: float) -> None:
        """Send a request and return at once. Poll with `done`, then call `result`."""
        alarm = int(seconds) + _ALARM_MARGIN_SECONDS
        self._begin([({"request": request, "alarm": alarm}, seconds)])

    def done(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds` for the answer; return False if it has not arrived."""
        until = time.monotonic() + seconds
        try:
            while self._asked and self._answer is None and self._step(until):
                pass
        except (OSError, ValueError) as error:
            self.close()
            self._answer = LimitExceeded(f"too much time or memory ({reason(error)})")
        except BaseException:  # the next request must not receive this answer
            self.close()
            raise
        return not self._asked or self._answer is not None

    def usable(self) -> bool:
        """Return True if the child is alive and owes no answer; drop an answer that has arrived."""
        if not self.done() or self.closed:
            return False
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return not poll.poll(0)  # an event would mean that the channel has ended

    def result(self) -> Any:
        """Wait for the last request and return its value. Raises Refused and LimitExceeded."""
        while not self.done(_START_SECONDS):
            pass
        answer, self._answer, self._asked = self._answer, None, False
        if isinstance(answer, LimitExceeded):
            raise answer
        assert answer is not None
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """Kill the child."""
        if not self.closed:
            self.closed = True
            self._kill()
            self._channel.close()

    def _begin(self, messages: list[tuple[dict[str, Any], float]]) -> None:
        self._waiting = deque(
            (json.dumps(message).encode() + b"\n", seconds) for message, seconds in messages
        )
        self._answer, self._asked = None, True
        if self.closed:
            self._answer = LimitExceeded("too much time or memory (its process ended)")
        else:
            self._next()
            self.done()  # send as much as the child accepts now

    def _next(self) -> None:
        """Start to send the first waiting message. Its time starts at the last byte sent."""
        self._unsent, self._seconds = self._waiting.popleft()
        self._read.clear()
        self._deadline = time.monotonic() + self._seconds

    def _step(self, until: float) -> bool:
        """Read or write once; return False at `until`. Raises OSError or ValueError."""
        left = min(until, self._deadline) - time.monotonic()
        poll = select.poll()  # select.select refuses descriptors from 1024 on
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = poll.poll(max(0.0, left) * 1000)
        if not events and time.monotonic() >= self._deadline:
            raise TimeoutError("no answer in time")
        if not events:
            return False
        if events[0][1] & select.POLLOUT:
            self._unsent = self._unsent[self._channel.send(self._unsent) :]
            self._deadline = time.monotonic() + self._seconds
            return True
        block = self._channel.recv(_BLOCK_BYTES)
        if not block:
            raise ValueError("its process ended")
        self._read += block
        if len(self._read) > MAX_ANSWER_BYTES:
            raise ValueError("its answer is too long")
        if block.endswith(b"\n"):
            answer = json.loads(self._read)
            if not self._waiting:
                self._answer = answer
            elif "error" not in answer:
                self._next()
            else:  # the remaining messages and this child are useless
                self.close()
                self._answer = answer
        return True


class LimitedProcess(Channel):
    """One child process that runs `python -m MODULE`. It starts at once, and again after a kill.

    Every new child gets the request `begin` first, within `begin_seconds`. Without `begin`, this
    request only waits for the child to start.
    """

    def __init__(
        self,
        module: str,
        begin: dict[str, Any] | None = None,
        begin_seconds: float = _START_SECONDS,
    ) -> None:
        self._module = module
        self._first: tuple[dict[str, Any], float] = {"request": begin}, begin_seconds
        self._ready = False
        self._open()

    def start(self, request: dict[str, Any], seconds: float) -> None:
        alarm = int(seconds) + _ALARM_MARGIN_SECONDS
        message = {"request": request, "alarm": alarm}, seconds
        if self.closed or self._process.poll() is not None:
            self.close()
            self._open()
        self._begin([message] if self._ready else [self._first, message])
        self._ready = True

    def copy(self) -> Channel:
        """Fork the child and return a channel to the copy. Raises LimitExceeded.

        The child must have answered a request and must have no other thread. Handler state is
        separate in both processes.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._channel, [_COPY], [theirs.fileno()])
            self._read.clear()
            self._asked, self._deadline = True, time.monotonic() + _COPY_SECONDS
            child = open_process(self.result())
        except OSError as error:
            ours.close()
            self.close()
            raise LimitExceeded(f"too much time or memory ({reason(error)})") from None
        except BaseException:
            ours.close()
            raise

        def kill() -> None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)

        return Channel(ours, kill)

    def _open(self) -> None:
        check_limits()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = process = subprocess.Popen(
                # -P: do not import a jinja2.py from the working directory
                [sys.executable, "-P", "-m", self._module],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to the engine only
            )

        def kill() -> None:
            process.kill()
            process.wait()

        self._ready = False
        super().__init__(ours, kill)


def serve(handler: Callable[[dict[str, Any]], Any], address_space_bytes: int) -> None:
    """Answer requests in the child until its channel, which is standard input, ends.

    `handler` takes each request and returns a value that JSON can carry. Any exception, including a
    panic of a Rust library, is sent back as text.
    """
    check_limits()
    assert resource is not None
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = (
        address_space_bytes if most == resource.RLIM_INFINITY else min(most, address_space_bytes)
    )
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forked copies leave no zombies
    channel = socket.socket(fileno=0)
    while True:
        line, descriptors = _request(channel)
        if not line:
            os._exit(0)
        if descriptors:
            answer = {"value": os.fork()}
            if answer["value"] == 0:  # in the copy: the new channel replaces the first one
                os.dup2(descriptors[0], 0)
                os.dup2(0, 1)
            os.close(descriptors[0])
            if answer["value"] == 0:
                continue
        else:
            answer = _answer(handler, json.loads(line))
        channel.sendall(json.dumps(answer).encode() + b"\n")


def _request(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Return a line and the descriptors that came with it; an empty line if the parent is gone."""
    line, descriptors = bytearray(), list[int]()
    while not line.endswith(b"\n"):
        block, found, _, _ = socket.recv_fds(channel, _BLOCK_BYTES, 1)
        if not block:
            return b"", []
        line += block
        descriptors += found
    return bytes(line), descriptors


def _answer(handler: Callable[[dict[str, Any]], Any], message: dict[str, Any]) -> dict[str, Any]:
    try:
        signal.alarm(message.get("alarm", 0))  # ends this process if the parent has died
        try:
            request = message["request"]
            return {"value": None if request is None else handler(request)}
        finally:
            signal.alarm(0)
    except MemoryError:
        return {"error": "it needs too much memory"}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # PanicException is not an Exception
        return {"error": f"{type(error).__name__}: {reason(error)}"[:_ERROR_CHARACTERS]}
