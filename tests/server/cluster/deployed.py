"""A Ray head with its dashboard, and docs/cluster/serve.yaml deployed to it by `serve deploy`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.server.cluster.two_nodes import REPLICA, below, ticks

DOCS = Path(__file__).parents[3] / "docs/cluster"
# In place of those of the page, for a small machine.
SMALL = {"cpus": 0.1, "memory": "64MiB"}
SLOW_S = 2  # Ray tells after so long that a replica is not placed; by default 30
_START_S = 120.0
_HEAD = [
    "start", "--head", "--block", "--num-cpus", "1", "--memory", str(1 << 30),
    "--object-store-memory", str(80 << 20), "--resources", '{"moeinf_drive":2}',
    "--node-ip-address", "127.0.0.1", "--dashboard-host", "127.0.0.1",
]  # fmt: skip


class Deployed:
    """The head, until it is closed. home: a folder with the demo."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._folder, self._log, self._opened = folder, folder / "head", ExitStack()
        # Paths of sockets are short.
        ray = self._opened.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        self._environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
            "RAY_SERVE_SLOW_STARTUP_WARNING_S": str(SLOW_S),
            "MOEINF_HOME": str(home),
        }
        self._environment.pop("RAY_ADDRESS", None)
        head, dashboard, agent, remote, self._port = free_ports(5)
        self._dashboard = f"http://127.0.0.1:{dashboard}"
        ports = {
            "--port": head, "--dashboard-port": dashboard, "--temp-dir": ray,
            "--dashboard-agent-listen-port": agent, "--ray-client-server-port": remote,
        }  # fmt: skip
        options = [str(part) for option in ports.items() for part in option]
        with self._log.open("wb") as log:
            self._head = subprocess.Popen(
                [_tool("ray"), *_HEAD, *options],
                env=self._environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._opened.callback(self._end)
        try:
            self._until(lambda: "runtime started" in self._log.read_text())
            self._until(self._dashboard_answers)
        except BaseException:
            self.close()
            raise
        self.client = self._opened.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60)
        )

    def deploy(self, **arguments: Any) -> None:
        """Deploy the page's serve.yaml with a free port and these arguments. Does not wait."""
        config = yaml.safe_load((DOCS / "serve.yaml").read_text())
        config["http_options"]["port"] = self._port
        config["applications"][0]["args"] |= SMALL | arguments
        file = self._folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self._serve("deploy", str(file))

    def status(self) -> Any:
        """Return what `serve status` tells of the application."""
        return yaml.safe_load(self._serve("status"))["applications"]["moeinf"]

    def wait(self, before: set[int] | None = None) -> None:
        """Wait until the application runs, with two replicas that were not there before."""

        def ready() -> bool:
            now = set(self.replicas())
            return len(now) == 2 and not now & (before or set()) and self._runs()

        self._until(ready)

    def replicas(self) -> dict[int, int]:
        """Return the clock ticks that each replica's process has spent, by its number."""
        found = {}
        for pid in below(self._head.pid):
            with suppress(OSError):
                if REPLICA in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found[pid] = ticks(pid)
        return found

    def _dashboard_answers(self) -> bool:
        headers = {"authorization": f"Bearer {self._environment['RAY_AUTH_TOKEN']}"}
        with suppress(httpx.HTTPError):
            url = f"{self._dashboard}/api/version"
            return httpx.get(url, headers=headers, timeout=5).status_code == 200
        return False

    def _runs(self) -> bool:
        status = self.status()
        states = [one["status"] for one in status["deployments"].values()]
        return status["status"] == "RUNNING" and set(states) == {"HEALTHY"}

    def _serve(self, command: str, *arguments: str) -> str:
        run = subprocess.run(
            [_tool("serve"), command, "-a", self._dashboard, *arguments],
            env=self._environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def _until(self, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_S
        while not ready():
            assert self._head.poll() is None, self._log.read_text()
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.1)

    def _end(self) -> None:
        for pid in {self._head.pid, *below(self._head.pid)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._head.wait()

    def close(self) -> None:
        """End the head and all that it has started."""
        self._opened.close()


def free_ports(count: int) -> list[int]:
    """Return ports that are free and differ."""
    with ExitStack() as opened:
        free = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in free]


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
