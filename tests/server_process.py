"""Start `moeinf serve` as a process of its own, and read what it holds."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import environment

resource = pytest.importorskip("resource", reason="needs limits of processes, which Windows lacks")

# The cyclic collector never runs, and other memory of the machine counts as used.
_START = """
import gc, sys
gc.enable = gc.disable
from moeinf.runtime.machine import memory
limit = int(sys.argv.pop(1))
if limit:
    memory._cgroups = lambda _root: [(limit, memory.rss_bytes())]
from moeinf.cli.entry import main
main()
"""


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens. log: the file of its standard error."""

    address: str
    pid: int
    log: Path

    @property
    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def open_files(self, part: str) -> int:
        """Return how many descriptors are of paths with this part."""
        found = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):
                found += part in str(link.readlink())
        return found

    @property
    def rss_bytes(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the document of an answer, which must be a success."""
        answer = httpx.post(f"{self.address}{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ask(self, model: str, prompt: str = "17+25=", **body: Any) -> dict[str, Any]:
        options = {"num_predict": 8, "temperature": 0, **body.pop("options", {})}
        return self.post(
            "/api/generate", model=model, prompt=prompt, stream=False, options=options, **body
        )

    def unload(self, model: str) -> None:
        self.post("/api/generate", model=model, keep_alive=0)

    def loaded(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.address}/api/ps").json()["models"]
        return found


@contextmanager
def server_process(
    home: Path, *options: str, memory_bytes: int = 0, files: int = 0, **variables: str
) -> Iterator[ServerProcess]:
    """Run a server in the block.

    memory_bytes: what it may use, of which it sees nothing else; 0: the machine's. files: the limit
    of descriptors, soft and hard; 0: that of this process.
    """

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    log = home / "server.log"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", _START, str(memory_bytes), "serve", "--port", "0", *options],
            env={**environment(home), **variables},
            stderr=stderr,
            preexec_fn=limit,
        ) as process,
    ):
        try:
            yield ServerProcess(_address(process, log), process.pid, log)
        finally:
            process.terminate()
            process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address once the server answers."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://\S+", log.read_text())
        if found is not None:
            try:
                httpx.get(f"{found[0]}/health", timeout=30)
            except httpx.TransportError:
                continue
            return found[0]
        time.sleep(0.05)
    raise AssertionError("the server does not listen")
