"""Each resource of a server has a bound: reach it, and the server answers as before.

One `moeinf serve` process meets all of them. In each test `/health` answers within a second, and
`17+25=` is 42 afterwards.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from moeinf.server.api.responses.store import MOST_STORED_BYTES
from moeinf.server.http.bodies import ALL_BODIES_BYTES
from tests.cli.conftest import COMMAND, environment
from tests.conftest import pull

resource = pytest.importorskip("resource", reason="needs limits of processes, which Windows lacks")
pytestmark = pytest.mark.linux("reads /proc")
HEALTH_S = 2.0  # twice what is promised, because other tests run beside these
LOOK_S = 0.2
MEMORY_BYTES = 6 << 30  # of addresses, to protect the machine
PREFIX_BYTES = 4 << 20
QUEUE = 4
KINDS = ("VmRSS", "Threads")


class Server:
    """A server's process, and what it holds."""

    def __init__(self, address: str, pid: int, home: Path) -> None:
        self.client = httpx.Client(base_url=address, timeout=60)
        self.pid, self.home = pid, home
        self.host, self.port = self.client.base_url.host, self.client.base_url.port or 0

    def number(self, name: str) -> int:
        """Return a figure of /proc/PID/status: bytes, or a count."""
        found = re.search(rf"^{name}:\s+(\d+)( kB)?", self._proc("status").read_text(), re.M)
        assert found is not None
        return int(found[1]) << (10 if found[2] else 0)

    @property
    def children(self) -> int:
        return len(self._proc(f"task/{self.pid}/children").read_text().split())

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self.pid}/{name}")

    def ask(self, **more: object) -> httpx.Response:
        body = {"model": "demo", "prompt": "17+25=", "stream": False, **more}
        return self.client.post("/api/generate", json=body)

    def post(self, path: str, body: bytes) -> socket.socket:
        """Send a request and do not read. The kernel buffers little of the answer."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(30)
        sock.connect((self.host, self.port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        return sock


class Watch:
    """Measure `/health` and the peak of each figure within a block."""

    def __init__(self, server: Server) -> None:
        self._server, self._end = server, threading.Event()
        self.slowest_s, self.peak = 0.0, Counter[str]()
        self.before = {kind: server.number(kind) for kind in KINDS}
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        with httpx.Client(base_url=self._server.client.base_url, timeout=30) as client:
            while not self._end.wait(LOOK_S):
                start = time.monotonic()
                assert client.get("/health").status_code == 200
                self.slowest_s = max(self.slowest_s, time.monotonic() - start)
                for kind in KINDS:
                    self.peak[kind] = max(self.peak[kind], self._server.number(kind))
                self.peak["children"] = max(self.peak["children"], self._server.children)

    def grew(self, kind: str) -> int:
        return self.peak[kind] - self.before[kind]


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES,) * 2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("source")
    pull(DEMO_CHECKPOINT, Settings(home), "demo:bf16")
    shutil.copytree(DEMO_CHECKPOINT, folder / "x")
    comment = "{#" + "\x01" * 900_000 + "#}"
    (folder / "x/chat_template.jinja").write_text(comment + "{{ messages[-1].content }}")
    pull(folder / "x", Settings(home), "wide:bf16")
    limits = {
        "MOEINF_NUM_PARALLEL": "1",
        "MOEINF_MAX_QUEUE": str(QUEUE),
        "MOEINF_PREFIX_DISK": str(PREFIX_BYTES),
    }
    log = home / "log"
    with (
        log.open("w") as written,
        subprocess.Popen(
            [*COMMAND, "serve", "--port", "0"],
            env={**environment(home), **limits},
            stderr=written,
            preexec_fn=limited,
        ) as process,
    ):
        while (found := re.search(r"http://\S+", log.read_text())) is None:
            assert process.poll() is None
            time.sleep(0.05)
        address = found[0]
        server = Server(address, process.pid, home)
        try:
            assert server.ask().json()["response"].startswith("42")
            yield server
        finally:
            server.client.close()
            process.terminate()


@pytest.fixture
def watch(server: Server) -> Iterator[Watch]:
    """Check what every bound has in common."""
    with Watch(server) as watch:
        yield watch
    assert watch.slowest_s <= HEALTH_S
    assert server.ask().json()["response"].startswith("42")


@pytest.mark.parametrize("clients", [100, pytest.param(700, marks=pytest.mark.full)])
def test_answers_that_clients_do_not_read(server: Server, watch: Watch, clients: int) -> None:
    """Each answer has 5 MB; 700 of them were 3.5 GB."""
    with ExitStack() as stack:
        socks = [
            stack.enter_context(server.post("/api/show", b'{"model":"wide:bf16"}'))
            for _ in range(clients)
        ]
        statuses = Counter(sock.recv(12)[-3:] for sock in socks)
        assert statuses[b"200"] * 5_000_000 <= ALL_BODIES_BYTES + 10_000_000
        assert statuses[b"200"] + statuses[b"503"] == clients, statuses
    assert watch.grew("VmRSS") <= 5 * ALL_BODIES_BYTES
    for _ in range(100):  # the budget is free again once the clients have left
        if server.client.post("/api/show", json={"model": "wide:bf16"}).status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError("the budget is still full")


def test_bodies_that_are_half_sent(server: Server, watch: Watch) -> None:
    head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(socket.create_connection((server.host, server.port), 30))
            with suppress(OSError):  # the server may refuse it before all of this is sent
                sock.sendall(head + b" " * 7_900_000)
        assert server.client.get("/health").status_code == 200
    assert watch.grew("VmRSS") <= 3 * ALL_BODIES_BYTES


def test_requests_that_wait(server: Server, watch: Watch) -> None:
    """The queue of a model, whose requests need no thread each."""
    with ThreadPoolExecutor(24) as pool:
        asked = [
            pool.submit(server.ask, prompt=f"{n} abc", options={"num_predict": 60})
            for n in range(24)
        ]
        statuses = Counter(one.result().status_code for one in asked)
    assert statuses[200] + statuses[503] == 24
    assert statuses[200] >= QUEUE
    assert watch.grew("Threads") <= 16


@pytest.mark.parametrize("path", ["/api/verify", "/api/create", "/api/pull", "/api/plan"])
def test_long_work_takes_turns(server: Server, watch: Watch, path: str) -> None:
    """Each kind has a few threads, and refuses what is beyond the waiting ones."""
    bodies = {
        "/api/create": {"model": "other", "from": "demo", "system": "x"},
        "/api/pull": {"model": "demo"},
    }
    body = {"stream": False, **bodies.get(path, {"model": "demo"})}
    with ThreadPoolExecutor(60) as pool:
        asked = [pool.submit(server.client.post, path, json=body) for _ in range(60)]
        statuses = Counter(one.result().status_code for one in asked)
    assert not statuses.keys() - {200, 400, 409, 502, 503, 504}, statuses
    assert watch.grew("Threads") <= 45


def test_children_of_grammars(server: Server, watch: Watch) -> None:
    with ThreadPoolExecutor(12) as pool:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        asked = [
            pool.submit(server.ask, format=schema, options={"num_predict": 30}) for _ in range(12)
        ]
        assert {one.result().status_code for one in asked} <= {200, 503}
    assert watch.peak["children"] <= 1 + 1 + QUEUE  # the template's, and one for each request


def test_responses_that_are_kept(server: Server, watch: Watch) -> None:
    """The oldest leave when their documents have 32 MiB together."""
    body = {"model": "demo", "input": "1+1=", "max_output_tokens": 4}
    names = []
    for _ in range(8):
        metadata = {"text": "x" * 6_000_000}
        answer = server.client.post("/v1/responses", json={**body, "metadata": metadata})
        names.append(answer.json()["id"])
    paths = [f"/v1/responses/{name}" for name in (names[0], names[-1])]
    assert [server.client.get(path).status_code for path in paths] == [404, 200]
    assert watch.grew("VmRSS") <= 6 * MOST_STORED_BYTES


def test_prefixes_on_the_disk(server: Server, watch: Watch) -> None:
    for number in range(12):
        prompt = "".join(chr(97 + (number * 7 + at * (number + 3)) % 26) for at in range(450))
        assert server.ask(prompt=prompt, options={"num_predict": 1}).status_code == 200
    kept = [path for path in (server.home).rglob("*") if "prefix" in str(path) and path.is_file()]
    assert sum(path.stat().st_size for path in kept) <= PREFIX_BYTES
