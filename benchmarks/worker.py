"""The processes of a race, driven from one: each loads a model once and then serves requests.

It imports neither moeinf nor any peer. A worker prints one JSON object per line on its standard
output: first a greeting with the time when it was ready, then one answer per request line. The
requests are:

    {"do": "reset"}                     -> {}                   an empty context
    {"do": "prefill", "tokens": [...]}  -> {"seconds": s}       until its logits are ready
    {"do": "decode", "tokens": [...]}   -> {"seconds": [...]}   one pass for each token
    {"do": "logits"}                    -> {"logits": [...]}    of the last token
    {"do": "about"}                     -> the worker's own facts
    {"do": "turn", "prompts": [[...]], "answers": [[...]], "limit_s": s}
                                        -> {"first": s, "steps": [s...], "forced": bool,
                                            "first_disk_bytes": n}

A *turn* appends a prompt to each of several conversations, all at once, and decodes an answer to
each, one token of each per step. It ends early after `limit_s`. `forced`: the answers' tokens were
fed; a program that chooses its own tokens uses only their number. `first_disk_bytes`: `disk_bytes`
(see below) when the first step began, where that is known.

Every answer also has its time (`at`) and three figures of the process: the bytes read from disk so
far (`disk_bytes`), the peak memory (`peak_bytes`) and the processor time (`cpu_s`). Page faults
count as disk bytes. Disk bytes and peak memory are 0 where the system does not count them.

Times are those of time.monotonic(), which all processes of a machine share. A worker without a
request sleeps, so that two can run on one machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

_ROOT = Path(__file__).parents[1]


class WorkerFailed(RuntimeError):
    """A worker exited before it answered; the message has its standard error."""


class WorkerLate(WorkerFailed):
    """A worker was killed because its time was over."""


class Talker(Protocol):
    """The requests that a worker of the suite serves."""

    def reset(self) -> None: ...
    def turn(
        self, prompts: list[list[int]], answers: list[list[int]], limit_s: float
    ) -> dict[str, Any]: ...
    def about(self) -> dict[str, Any]: ...


class Runner(Talker, Protocol):
    """The further requests of a worker of a race: pass by pass, for one conversation."""

    def prefill(self, tokens: list[int]) -> float: ...
    def decode(self, tokens: list[int]) -> list[float]: ...
    def logits(self) -> list[float]: ...


def forced_turn(
    first: Callable[[], object],
    step: Callable[[list[int]], object],
    answers: list[list[int]],
    limit_s: float,
) -> dict[str, Any]:
    """Time a turn whose answers are given.

    `first` reads the prompts, `step` takes the next token of every answer. Both must return when
    their logits are ready.
    """
    start = time.perf_counter()
    first()
    now = time.perf_counter()
    found: dict[str, Any] = {"first": now - start, "steps": [], "forced": True}
    found["first_disk_bytes"] = _counted("io", "read_bytes")
    now = time.perf_counter()
    for column in zip(*answers, strict=True):
        if now - start > limit_s:
            break
        step(list(column))
        before, now = now, time.perf_counter()
        found["steps"].append(now - before)
    return found


def claim_stdout() -> TextIO:
    """Return a file on the standard output and redirect later prints to standard error.

    For workers whose libraries print: their lines would be taken for answers.
    """
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def serve(runner: Talker, greeting: dict[str, Any], out: TextIO = sys.stdout) -> None:
    """Serve requests until the standard input ends."""
    _say(out, greeting)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        match request["do"]:
            case "reset":
                runner.reset()
            case "prefill" | "decode" as verb:
                answer = {"seconds": getattr(runner, verb)(request["tokens"])}
            case "logits" as verb:
                answer = {"logits": getattr(runner, verb)()}
            case "about":
                answer = runner.about()
            case "turn":
                given = (request[name] for name in ("prompts", "answers", "limit_s"))
                answer = runner.turn(*given)
        counts: dict[str, float] = {
            "disk_bytes": _counted("io", "read_bytes"),
            "peak_bytes": _peak_bytes(),
        }
        counts["cpu_s"] = time.process_time()
        _say(out, answer | {"at": time.monotonic()} | counts)


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _counted(file: str, name: str) -> int:
    """Return a number of /proc/self; 0 where it is missing."""
    with suppress(OSError):
        text = Path("/proc/self", file).read_text()
        match = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


def _peak_bytes() -> int:
    return 1024 * _counted("status", "VmHWM")


class Worker:
    """A worker's process, seen from the race. It is a context manager."""

    def __init__(self, command: Sequence[str], limit_s: float | None = None) -> None:
        """Start the worker and wait until it is ready.

        limit_s: the most seconds from the start to the last answer; a later one is not waited for,
        and the worker is killed. Raises WorkerFailed.
        """
        self.started_at = time.monotonic()
        self._limit_s = limit_s
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a full pipe would stop it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=_ROOT,
        )
        try:
            self.greeting = self._answer()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def ask(self, do: str, tokens: Sequence[int] = (), **more: object) -> dict[str, Any]:
        """Send one request and return its answer. Raises WorkerFailed."""
        assert self._process.stdin is not None
        request = {"do": do, **more} | ({"tokens": list(tokens)} if tokens else {})
        with suppress(BrokenPipeError):  # it has exited: _answer reports how
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the worker finish its request; kill it when this process itself must end."""
        if kind is not None and not issubclass(kind, Exception):
            self._process.kill()
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        left = (self._limit_s or 0) - (time.monotonic() - self.started_at)
        timer = threading.Timer(max(0, left), end)
        if self._limit_s is not None:
            timer.start()
        while (line := self._process.stdout.readline()) and not line.startswith("{"):
            pass  # a line that a library printed during its import
        timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        with suppress(BrokenPipeError):
            self._process.communicate()
        if late.is_set():
            raise WorkerLate(f"no answer within {self._limit_s:.0f} s")
        self._errors.seek(0)
        raise WorkerFailed(f"exit code {self._process.returncode}: {self._errors.read()[-2000:]}")
