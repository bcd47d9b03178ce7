"""A running `moeinf serve --cluster local`, and its replicas' processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.server.cluster.clients import killed, metric, streamed
from tests.server.cluster.two_nodes import REPLICA, ticks

PROGRAM = "from moeinf.cli.entry import main; main()"


class Cluster:
    """A running `moeinf serve --cluster local`. before: lines of Python that run first."""

    def __init__(self, home: Path, log: Path, *options: str, before: str = "") -> None:
        self._log = log
        command = [sys.executable, "-c", before + PROGRAM]
        command += ["serve", "--cluster", "local", *options]
        environment = {**os.environ, "MOEINF_HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
        with log.open("wb") as file:
            self.process = subprocess.Popen([*command, "--port", "0"], stderr=file, env=environment)
        until = time.monotonic() + 120
        while not (found := re.search(r"http://(\S+)", log.read_text())):
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        self.client = httpx.Client(base_url=f"http://{found[1]}", timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(path, json=body)

    def metric(self, pattern: str) -> float:
        """Return the sum of the samples of /metrics that match."""
        return metric(self.client, pattern)

    def replicas(self) -> dict[int, int]:
        """Return the clock ticks that each replica's process has spent, by its number."""
        found = {}
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(folder.name)
                ours = REPLICA in (folder / "cmdline").read_bytes()
                if ours and self.process.pid in _ancestors(pid):
                    found[pid] = ticks(pid)
        return found

    def long_answer(self, kill_after: int = 0) -> tuple[str, list[str]]:
        """Return the text and the lines of a stream; kill its replica after so many lines."""
        if not kill_after:
            return streamed(self.client)
        return killed(self.client, self.replicas, kill_after)

    def close(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


def _ancestors(pid: int) -> list[int]:
    """Return the numbers of a process's parent, its parent's parent and so on."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found
