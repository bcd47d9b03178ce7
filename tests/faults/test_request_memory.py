"""A server process under the most wasteful requests: memory stays near the body's size."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.server.app import create_app
from moeinf.server.http.bodies import ALL_BODIES_BYTES, MOST_BODY_BYTES
from tests.cli.conftest import COMMAND, environment
from tests.faults.conftest import EVERY, Tally
from tests.server.request_shapes import MODEL, least, places

resource = pytest.importorskip("resource", reason="needs limits of processes, which Windows lacks")
TIMES = 16  # multiple of the body
FREE_BYTES = 16 << 20  # for short bodies with many small objects
ITEMS = 1_000_000
WRONG = ("{}", "-9")
AND_ONCE = ('"ab"', "null", "[]", "[[]]", '{"a":{}}', "1.5", '"\U0001f600"', "[[],[],[]]")


class Process:
    """A `moeinf serve` process and its memory."""

    def __init__(self, address: str, pid: int) -> None:
        self.client = httpx.Client(base_url=address, timeout=60)
        self._folder = Path(f"/proc/{pid}")

    def grew_by(self, method: str, path: str, body: str) -> tuple[int, int]:
        """Return a request's status and the bytes of memory at its peak."""
        headers = {"Content-Type": "application/json"}
        with self.peak() as peak:
            answer = self.client.request(method, path, content=body.encode(), headers=headers)
        return answer.status_code, peak()

    @contextmanager
    def peak(self) -> Iterator[Callable[[], int]]:
        """Measure the peak memory within the block, beyond the memory before."""
        (self._folder / "clear_refs").write_text("5")
        before = self._bytes("VmRSS")
        yield lambda: self._bytes("VmHWM") - before

    def _bytes(self, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", (self._folder / "status").read_text(), re.M)
        assert found is not None
        return int(found[1]) << 10


def _limited() -> None:
    """Limit memory, to protect the machine from a request that goes wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30,) * 2)


@contextmanager
def serving_process(home: Path) -> Iterator[Process]:
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0"],
        env=environment(home),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_limited,
    ) as process:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        server = Process(found[0], process.pid)
        try:
            for _ in range(200):
                try:
                    server.client.get("/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.05)
            yield server
        finally:
            server.client.close()
            process.terminate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving_process(tmp_path_factory.mktemp("home")) as process:
        process.client.post("/api/show", json={"model": MODEL})
        yield process


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = Settings(tmp_path_factory.mktemp("home"))
    return create_app(settings, ServerSettings(), EngineConfig()).openapi()


def check(server: Process, method: str, path: str, body: str, what: str) -> int:
    start = time.monotonic()
    status, peak = server.grew_by(method, path, body)
    assert status in (400, 404, 413), (what, status)
    size = len(body.encode())
    assert peak <= TIMES * size + FREE_BYTES, (what, peak / size)
    assert time.monotonic() - start < 10, what
    return status


@pytest.mark.linux("reads /proc")
def test_lists_of_a_million_wrong_items(
    server: Process, document: dict[str, Any], tally: Tally
) -> None:
    arrays = [place for place in places(document) if place.kind == "array"]
    for number, place in enumerate(arrays):
        some = WRONG if EVERY else (WRONG[number % len(WRONG)],)
        for wrong in some if place.path != "/api/embed" else WRONG + AND_ONCE:
            count = min(ITEMS, (MOST_BODY_BYTES - 1000) // (len(wrong.encode()) + 1))
            body = place.body(f"[{','.join([wrong] * count)}]")
            status = check(server, place.method, place.path, body, f"{place} {wrong}")
            tally(f"status {status}")


@pytest.mark.linux("reads /proc")
def test_objects_of_many_fields(server: Process, document: dict[str, Any], tally: Tally) -> None:
    fields = ",".join(f'"k{number}":{number}' for number in range(60_000))
    for place in places(document):
        if place.kind == "object":
            body = place.body(f"{{{fields}}}")
            tally(f"status {check(server, place.method, place.path, body, str(place))}")


@pytest.mark.linux("reads /proc")
def test_as_many_items_as_are_taken(
    server: Process, document: dict[str, Any], tally: Tally
) -> None:
    """The longest lists of the smallest valid items: many tiny messages, tools, calls."""
    schemas = document["components"]["schemas"]
    for place in places(document):
        if place.kind == "array":
            item = json.dumps(least(place.schema["items"], schemas))
            for count in (2048, 4096):
                body = place.body(f"[{','.join([item] * count)}]")
                status = check(server, place.method, place.path, body, f"{place} {count}")
                tally(f"status {status}")


@pytest.mark.linux("reads /proc")
def test_enums_of_millions_and_options(server: Process, tally: Tally) -> None:
    names = ",".join(f'"{number}"' for number in range(900_000))
    numbers = ",".join(map(str, range(1_000_000)))
    for values in (names, numbers):
        for path, body in {
            "/api/generate": f'{{"model": "{MODEL}", "format": {{"enum": [{values}]}}}}',
            "/api/chat": f'{{"model": "{MODEL}", "options": {{"stop": [{values}]}}}}',
            "/api/embed": f'{{"model": "{MODEL}", "input": "", "options": {{"stop": [{values}]}}}}',
        }.items():
            tally(f"status {check(server, 'POST', path, body, path)}")


@pytest.mark.linux("reads /proc")
def test_many_bodies_that_are_half_sent(server: Process, tally: Tally) -> None:
    """40 of them once held 1.3 GB for a minute."""
    host, port = server.client.base_url.host, server.client.base_url.port
    assert port is not None
    head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n"
    with ExitStack() as stack, server.peak() as peak:
        for _ in range(40):
            sock = stack.enter_context(socket.create_connection((host, port), timeout=30))
            with suppress(OSError):  # the server may refuse it before all of this is sent
                sock.sendall(head + b" " * 7_900_000)
            tally("half a body")
        assert server.client.get("/health").status_code == 200
    assert peak() <= 2 * ALL_BODIES_BYTES + FREE_BYTES


def test_every_list_has_a_length(document: dict[str, Any]) -> None:
    unbounded = [
        str(p) for p in places(document) if p.kind == "array" and "maxItems" not in p.schema
    ]
    assert unbounded == []
