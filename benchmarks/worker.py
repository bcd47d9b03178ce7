"""The processes of a race, driven from one: each loads a model once and then does as it is told.

Knows neither moeinf nor any peer. A worker prints one JSON object per line on its standard output:
first what it is and when it was ready, then one answer per request line. Requests:

    {"do": "reset"}                     -> {}                   an empty context
    {"do": "prefill", "tokens": [...]}  -> {"seconds": s}       until its logits are there
    {"do": "decode", "tokens": [...]}   -> {"seconds": [...]}   one pass for each token
    {"do": "logits"}                    -> {"logits": [...]}    of the last token
    {"do": "about"}                     -> what the worker has to say

Every answer also says when it was given (`at`) and what the process has read from disk so far
(`disk_bytes`, page faults included; 0 where the system does not count it).

Times of day are those of time.monotonic(), which all processes of a machine share. A worker that is
not asked anything sleeps, so that two can live side by side.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

_ROOT = Path(__file__).parents[1]


class WorkerFailed(RuntimeError):
    """A worker ended before it answered; what it wrote to its standard error is in the message."""


class Runner(Protocol):
    """What a worker does with requests."""

    def reset(self) -> None: ...
    def prefill(self, tokens: list[int]) -> float: ...
    def decode(self, tokens: list[int]) -> list[float]: ...
    def logits(self) -> list[float]: ...
    def about(self) -> dict[str, Any]: ...


def serve(runner: Runner, greeting: dict[str, Any], out: TextIO = sys.stdout) -> None:
    """The loop of a worker: until its standard input ends."""
    _say(out, greeting)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        match request["do"]:
            case "reset":
                runner.reset()
            case "prefill" | "decode" as verb:
                answer = {"seconds": getattr(runner, verb)(request["tokens"])}
            case "logits":
                answer = {"logits": runner.logits()}
            case "about":
                answer = runner.about()
        _say(out, answer | {"at": time.monotonic(), "disk_bytes": _disk_bytes()})


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _disk_bytes() -> int:
    with suppress(OSError):
        match = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


class Worker:
    """A worker's process, seen from the race. Use as a context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        """Returns when the worker is ready. Raises WorkerFailed."""
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self.greeting = self._answer()

    def ask(self, do: str, tokens: Sequence[int] = ()) -> dict[str, Any]:
        """One request and its answer. Raises WorkerFailed."""
        assert self._process.stdin is not None
        request = {"do": do, "tokens": list(tokens)} if tokens else {"do": do}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, errors = self._process.communicate()
            raise WorkerFailed(f"exit code {self._process.returncode}: {errors[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
