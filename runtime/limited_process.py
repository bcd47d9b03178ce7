"""Run untrusted work in a child process that has little memory and little time.

Does not know what the work is. Chat templates, grammars and tokenizer files are data of strangers,
and the libraries that read them can crash, hang, or take all memory. Both ends are in this file:

    parent: LimitedProcess.ask ── a line of JSON ──▶ serve: handler(request)
                               ◀── a line of JSON ── {"value": …} or {"error": "…"}

The child limits its own address space. The parent enforces the wall time and kills a late child.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_ANSWER_BYTES = 16 << 20
_START_SECONDS = 20.0
_ALARM_MARGIN_SECONDS = 4  # the child ends itself this long after the parent should have ended it
_ERROR_CHARACTERS = 500


class Refused(ValueError):
    """The child's handler refused the request, in its own words."""


class LimitExceeded(ValueError):
    """The child took too much time or memory, or crashed. It has been killed."""


class LimitedProcess:
    """One child process that runs `python -m MODULE`; it starts at once, and again after a kill.

    `begin` is a request that every new child gets before all others, or None.
    """

    def __init__(self, module: str, begin: dict[str, Any] | None = None) -> None:
        self._module, self._begin = module, begin
        self._process = self._start()
        self._ready = False

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """Return the handler's value. Raises Refused, or LimitExceeded after `seconds`."""
        if self._process.poll() is not None:
            self.close()
            self._process, self._ready = self._start(), False
        if not self._ready:
            self._exchange({"request": self._begin}, _START_SECONDS)
            self._ready = True
        alarm = int(seconds) + _ALARM_MARGIN_SECONDS
        return self._exchange({"request": request, "alarm": alarm}, seconds)

    def close(self) -> None:
        """Kill the child. `ask` starts another one."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: a jinja2.py in the working directory must not be imported
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the engine
        )

    def _exchange(self, message: dict[str, Any], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            self._send(json.dumps(message).encode() + b"\n", deadline)
            answer = json.loads(self._receive(deadline))
        except (OSError, ValueError) as error:
            self.close()
            raise LimitExceeded(f"too much time or memory ({error})") from None
        except BaseException:  # the answer must not be taken for that to the next request
            self.close()
            raise
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["value"]

    def _send(self, line: bytes, deadline: float) -> None:
        """Write a line. Raises OSError when the child does not read it in time."""
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        os.set_blocking(descriptor, False)
        rest = memoryview(line)
        while rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [descriptor], [], left)[1]:
                raise TimeoutError("no answer in time")
            rest = rest[os.write(descriptor, rest) :]

    def _receive(self, deadline: float) -> bytes:
        """Read a line. Raises OSError or ValueError when it does not come, or is too long."""
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), bytearray()
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError("no answer in time")
            block = os.read(descriptor, 1 << 16)
            if not block:
                raise ValueError("its process ended")
            line += block
            if len(line) > MAX_ANSWER_BYTES:
                raise ValueError("its answer is too long")
        return bytes(line)


def serve(handler: Callable[[dict[str, Any]], Any], address_space_bytes: int) -> None:
    """Answer requests in the child until standard input ends.

    `handler` gets each request and returns a value that JSON can carry. An exception of any kind,
    also a panic of a Rust library, is sent back as text.
    """
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any]
        try:
            signal.alarm(message.get("alarm", 0))  # ends this process if the parent has died
            try:
                request = message["request"]
                answer = {"value": None if request is None else handler(request)}
            finally:
                signal.alarm(0)
        except MemoryError:
            answer = {"error": "it needs too much memory"}
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException is no Exception
            answer = {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
