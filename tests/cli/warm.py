"""Run command lines in processes forked from one that has imported torch and the engine.

A start takes milliseconds instead of seconds. huggingface_hub is not imported before the fork,
because it reads its variables on import.

    test ──(arguments, variables, folder, fds)──▶ server ──fork──▶ keeper ──fork──▶ command
         ◀────────────── pid, then exit code ─────────────────────────┘

Run as a program, this file is the server.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

_LARGEST = 1 << 20  # bytes of a request
_PRELOAD = (
    "moeinf.cli.main", "moeinf.cli.chat.local", "moeinf.cli.chat.repl",
    "moeinf.runtime.library.repacking.repack", "fastapi", "filelock", "gguf", "httpx2",
    "llguidance", "prometheus_client", "tqdm.auto", "truststore", "uvicorn", "yaml",
)  # fmt: skip


class Warm:
    """A running command line; its attributes and methods are those of subprocess.Popen."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        stdin: IO[Any] | None = None,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
    ) -> None:
        """Start it. A missing stream is /dev/null. Skips the test on other systems than Linux."""
        if sys.platform != "linux":
            import pytest  # the server needs none

            pytest.skip("needs Linux: forks a warm process over a SOCK_SEQPACKET")
        request = json.dumps([list(arguments), dict(environment), str(folder or Path.cwd())])
        self._answers, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self.returncode: int | None = None
        with theirs, Path(os.devnull).open("r+b") as nothing:
            streams = [(stream or nothing).fileno() for stream in (stdin, stdout, stderr)]
            data = request.encode()
            assert len(data) < _LARGEST
            socket.send_fds(_server(), [data], [theirs.fileno(), *streams])
        self.pid = int(self._answers.recv(32))

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; negative: the signal that ended it."""
        if self.returncode is None:
            self._answers.settimeout(timeout)
            self.returncode = int(self._answers.recv(32))
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, kind: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, kind)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Written(Warm):
    """A command that prints to files. text: its standard input. merged: stderr goes to stdout."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        text: str | None = None,
        merged: bool = False,
    ) -> None:
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        stderr = self._out if merged else self._err
        with tempfile.TemporaryFile() as given:
            given.write((text or "").encode())
            given.seek(0)
            stdin = None if text is None else given
            super().__init__(arguments, environment, folder, stdin, self._out, stderr)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait, and return all that it has printed."""
        self.wait(timeout)
        return _all_of(self._out), _all_of(self._err)


def _all_of(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode()


def started(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Warm, str, IO[str]]:
    """Start `moeinf serve`; return it, its address, and the rest of its standard error."""
    reading, writing = os.pipe()
    said = os.fdopen(reading, encoding="utf-8")
    with os.fdopen(writing, "wb") as stderr:
        server = Warm(["serve", *arguments], environment, stderr=stderr)
    line = said.readline()
    found = re.search(r"http://(\S+)", line)
    assert found is not None, line
    return server, found[1], said


@contextmanager
def serving(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[Warm, str, IO[str]]]:
    """Run `moeinf serve`; yield it, its address, and the rest of its standard error."""
    server, address, said = started(arguments, environment)
    with said:
        try:
            yield server, address, said
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            assert server.wait(20) in (0, -signal.SIGTERM)


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    folder: Path | None = None,
    text: str | None = None,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end. Its first word may be the path of a script instead."""
    process = Written(arguments, environment, folder, text, merged)
    printed = process.communicate()
    return subprocess.CompletedProcess(list(arguments), process.wait(), *printed)


@cache
def _server() -> socket.socket:
    """Start the server of this test process. It ends when the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST)
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-P", __file__, str(number)]
        server = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _serve(control: socket.socket) -> None:
    for module in _PRELOAD:
        __import__(module)
    early = [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]
    assert not early, early
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no wait
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _LARGEST, 4)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            _keep(json.loads(data), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(request: list[Any], descriptors: list[int]) -> None:
    """Fork the command and report its pid and exit code; only the command returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answers = socket.socket(fileno=descriptors[0])
    pid = os.fork()
    if pid:
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        answers.sendall(b"%d" % pid)
        _, status = os.waitpid(pid, 0)
        answers.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    answers.close()
    _become(*request, descriptors[1:])


def _become(
    arguments: list[str], environment: dict[str, str], folder: str, streams: list[int]
) -> None:
    from moeinf.cli.entry import main

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    for name in os.environ:
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    if os.isatty(0):  # it becomes the terminal of a session, so that Ctrl-C reaches the command
        os.setsid()
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    code: Any = 1
    try:
        if arguments[0].endswith(".py"):
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            sys.argv = ["moeinf", *arguments]
            main()
    except SystemExit as ended:
        code = ended.code
    except Exception:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the interpreter would take 0.7 s to free torch


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
