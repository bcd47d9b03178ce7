"""Two Ray nodes, as on two machines, and `moeinf serve --cluster` in front of them.

The second node has a network namespace of its own behind a slow link, and a small disk of its own.
Everything ends with the processes that are started here: no Ray of someone else is touched.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

HEALTH_S = 2.0  # shorter than in a real cluster: a test waits for it
GCS_S = 6  # the same for Ray's own time without its head
DISK = "64m"
REPLICA = b"ServeReplica:moeinf:replica"  # in the title of a replica's process
_START_S = 120.0
_SERVE = (
    "import moeinf.server.cluster.launch as launch; "
    f"launch.HEALTH_S = {HEALTH_S}; "
    "from moeinf.cli.entry import main; main()"
)
_RAY = [
    "--block", "--num-cpus", "1", "--object-store-memory", str(80 << 20),
    "--resources", '{"moeinf_drive":1}',
]  # fmt: skip


def usable() -> str:
    """Return why the nodes cannot be started here; empty if they can."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if os.getuid() != 0 or not Path("/dev/net/tun").exists() or missing:
        return "needs root, /dev/net/tun, ip, nsenter and unshare"
    return ""


class TwoNodes:
    """Both nodes; then a server. home: a folder with the demo, which the second node copies."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._folder, self._processes, self._opened = folder, folder / "processes", ExitStack()
        self._network = f"198.18.{os.getpid() % 250 + 1}"
        # Paths of sockets are short.
        self._ray = Path(self._opened.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        self._environment = {
            **os.environ,
            "RAY_TMPDIR": str(self._ray),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_S),
            "MOEINF_HOME": str(home),
        }
        self._environment.pop("RAY_ADDRESS", None)
        try:
            self._start(home, self._environment)
        except BaseException:
            self.close()
            raise

    def _start(self, home: Path, environment: dict[str, str]) -> None:
        self.link = self._run(
            [sys.executable, "-m", "tests.server.cluster.slow_link", self._network, "0", "0"],
            environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.link.stdout is not None
        assert self.link.stdout.readline() == b"up\n"
        port, self.client_port = (self._free_port() for _ in range(2))
        ray = [str(Path(sys.executable).with_name("ray")), "start", *_RAY]
        self.head = self._run(
            [*ray, "--head", "--port", str(port), "--node-ip-address", f"{self._network}.1",
             "--ray-client-server-port", str(self.client_port), "--include-dashboard", "false",
             "--temp-dir", str(self._ray)],
            environment,
        )  # fmt: skip
        self._until(lambda: _answers(f"{self._network}.1", port), self.head)
        address = f"{self._network}.1:{port}"
        disk = self._folder / "disk"
        disk.mkdir()
        command = " ".join([
            f"mount -t tmpfs -o size={DISK} moeinf {disk} && cp -r {home}/models {disk} &&",
            "exec", *map(shlex.quote, ray), "--address", address,
            "--node-ip-address", f"{self._network}.2",
        ])  # fmt: skip
        self.second = self._run(
            ["nsenter", f"--net=/proc/{self.link.pid}/ns/net", "unshare", "--mount",
             "sh", "-c", command],
            {**environment, "MOEINF_HOME": str(disk)},
        )  # fmt: skip
        self.disk = Path(f"/proc/{self.second.pid}/root{disk}")
        self._until(lambda: self._processes.read_text().count("runtime started") == 2, self.second)
        self._address = address

    def _free_port(self) -> int:
        with socket.socket() as free:
            free.bind((f"{self._network}.1", 0))
            port: int = free.getsockname()[1]
        return port

    def serve(self, *options: str) -> None:
        """Start the server in the first node, as `server`, and connect to it, as `client`."""
        self.server = self._serve({"RAY_ADDRESS": self._address}, "auto", *options)
        self.client = self._connected()

    @contextmanager
    def remote(self, *options: str) -> Iterator[httpx.Client]:
        """Run a server through Ray's client, until it ends after SIGINT."""
        host = {"MOEINF_HOST": f"127.0.0.1:{self._free_port()}"}
        address = f"ray://{self._network}.1:{self.client_port}"
        process = self._serve(host, address, *options)
        yield self._connected()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, self.said()

    def _serve(
        self, environment: dict[str, str], address: str, *options: str
    ) -> subprocess.Popen[bytes]:
        port = [] if "MOEINF_HOST" in environment else ["--port", "0"]
        with (self._folder / "server").open("wb") as file:
            process = self._run(
                [sys.executable, "-c", _SERVE, "serve", "--cluster", address, *port,
                 "--replicas", "2", *options],
                {**self._environment, **environment},
                stderr=file,
            )  # fmt: skip
        self._until(lambda: "listening" in self.said(), process)
        return process

    def _connected(self) -> httpx.Client:
        found = re.search(r"http://(\S+)", self.said())
        assert found is not None
        return self._opened.enter_context(httpx.Client(base_url=f"http://{found[1]}", timeout=60))

    def _run(
        self, command: list[str], environment: dict[str, str], **more: object
    ) -> subprocess.Popen[bytes]:
        """Start a process and its group; they end with this object."""
        log = self._opened.enter_context(self._processes.open("ab"))
        options = {"stdout": log, "stderr": log, **more}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **options)  # type: ignore[call-overload]
        self._opened.callback(self._end, process)
        return process  # type: ignore[no-any-return]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        groups = {process.pid} | set(below(process.pid))
        for pid in groups:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _until(self, ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + _START_S
        while not ready():
            said = self._processes.read_text()
            assert process.poll() is None, said + self.said()
            assert time.monotonic() < until, said + self.said()
            time.sleep(0.1)

    def said(self) -> str:
        """Return what the server has printed."""
        log = self._folder / "server"
        return log.read_text() if log.exists() else ""

    def slow(self, delay_s: float, loss: float) -> None:
        """Delay packets between the nodes, and lose a share of them."""
        assert self.link.stdin is not None
        self.link.stdin.write(f"{delay_s} {loss}\n".encode())
        self.link.stdin.flush()

    def replicas(self) -> dict[int, str]:
        """Return the replicas' processes, and the node of each: `here` or `there`."""
        found = {}
        for node, process in (("here", self.head), ("there", self.second)):
            for pid in below(process.pid):
                with suppress(OSError):
                    if REPLICA in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found[pid] = node
        return found

    def spent(self) -> dict[int, int]:
        """Return the clock ticks that each replica's process has spent."""
        return {pid: ticks(pid) for pid in self.replicas()}

    def gcs(self) -> int:
        """Return the process that is the head of the cluster."""
        (found,) = (
            pid
            for pid in below(self.head.pid)
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/gcs_server")
        )
        return found

    def close(self) -> None:
        """End the server, the nodes and the link."""
        self._opened.close()


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


def below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    found = list[int]()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *below(int(child))]
    return found


def ticks(pid: int) -> int:
    """Return the clock ticks that a process has spent."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
