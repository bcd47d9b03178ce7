"""Run a command line at a pseudo-terminal: `pexpect.spawn` for processes of tests/cli/warm.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import pexpect
import pytest

from tests.cli.warm import Warm

NO_TERMINALS = "needs pseudo-terminals, which Windows lacks"
termios = pytest.importorskip("termios", reason=NO_TERMINALS)
PtyProcess = pytest.importorskip("ptyprocess", reason=NO_TERMINALS).PtyProcess


def spawn(
    environment: Mapping[str, str], *arguments: str, rows: int = 40, columns: int = 200
) -> pexpect.spawn[str]:
    """Start the command line in a terminal of that size."""
    return _Spawn(
        sys.executable,
        ["moeinf", *arguments],
        env={**environment},
        encoding="utf-8",
        timeout=60,
        dimensions=(rows, columns),
    )


class _Spawn(pexpect.spawn):  # type: ignore[type-arg]
    """A spawn that forks the command, and does not execute Python."""

    def _spawnpty(
        self, args: list[bytes], *, env: dict[str, str], dimensions: tuple[int, int], **_: Any
    ) -> PtyProcess:
        master, slave = os.openpty()
        termios.tcsetwinsize(master, dimensions)
        with os.fdopen(slave, "r+b", buffering=0) as terminal:
            words = [word.decode() for word in args[2:]]  # without Python and moeinf
            return _Pty(Warm(words, env, None, terminal, terminal, terminal), master)


class _Pty(PtyProcess):  # type: ignore[misc]
    """A process that is no child of this one."""

    def __init__(self, command: Warm, master: int) -> None:
        super().__init__(command.pid, master)
        self._command = command

    def isalive(self) -> bool:
        code = self._command.wait() if self.flag_eof else self._command.poll()
        if code is not None and not self.terminated:
            self.terminated = True
            self.exitstatus, self.signalstatus = (code, None) if code >= 0 else (None, -code)
        return code is None

    def wait(self) -> int | None:
        self._command.wait()
        self.isalive()
        status: int | None = self.exitstatus
        return status
