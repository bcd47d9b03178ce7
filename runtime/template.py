"""Renders chat templates. A template comes with a download, so it is taken to be hostile.

Does not know tokens or models. Rendering happens in a worker process of its own that has Jinja's
sandbox, little memory and little time: the sandbox alone does not stop `'a' * 10**9`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

RENDER_SECONDS = 1.0
START_SECONDS = 20.0
MAX_TEXT_BYTES = 16 << 20


class TemplateError(ValueError):
    """A model's chat template cannot be rendered."""


class TemplateWorker:
    """One worker process with one template; started at once, restarted when it had to be killed."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._process = self._start()
        self._ready = False

    def render(self, messages: list[dict[str, str]], **variables: Any) -> str:
        """The prompt text. Raises TemplateError when the template refuses, or is too much."""
        if self._process.poll() is not None:
            self._process, self._ready = self._start(), False
        if not self._ready:
            self._ready = self._exchange({"template": self._template}, START_SECONDS) == ""
        return self._exchange({"messages": messages, **variables}, RENDER_SECONDS)

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: a jinja2.py in the folder we stand in must not be imported
            [sys.executable, "-P", "-m", "moeinf.runtime.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the engine
        )

    def _exchange(self, request: dict[str, Any], seconds: float) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            line = _read_line(stdout.fileno(), time.monotonic() + seconds)
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            self.close()
            raise TemplateError(
                f"the chat template took too much time or memory ({error})"
            ) from None
        except BaseException:  # its answer must not be taken for that to the next request
            self.close()
            raise
        if "error" in answer:
            raise TemplateError(f"the chat template cannot be rendered: {answer['error']}")
        return str(answer["text"])


def _read_line(descriptor: int, deadline: float) -> bytes:
    """One line from a pipe. Raises OSError or ValueError when it does not come, or is too long."""
    line = bytearray()
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError("no answer in time")
        block = os.read(descriptor, 1 << 16)
        if not block:
            raise ValueError("its process ended")
        line += block
        if len(line) > MAX_TEXT_BYTES:
            raise ValueError("its text is too long")
    return bytes(line)
