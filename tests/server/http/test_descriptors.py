"""Connections and files of experts share the descriptors of a server; neither takes all."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest

from moeinf.runtime.config import Settings
from scripts.make_checkpoint import config, make_checkpoint
from tests.conftest import pull
from tests.server_process import ServerProcess, server_process

FILES = 1024  # soft and hard
pytestmark = pytest.mark.linux("reads /proc")


@contextmanager
def silent(server: ServerProcess, count: int) -> Iterator[list[socket.socket]]:
    """Hold so many connections that say nothing; those that are closed stay so."""
    where = httpx.URL(server.address)
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((where.host, where.port), timeout=30))
            for _ in range(count)
        ]


def hung_up(connection: socket.socket) -> bool:
    """Return whether the other side has closed the connection."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@contextmanager
def watched(server: ServerProcess) -> Iterator[list[float]]:
    """Ask for /health meanwhile, with a new connection each time; yield the seconds of each."""
    seconds, ended = list[float](), Event()

    def look() -> None:
        while not ended.wait(0.05):
            start = time.monotonic()
            assert httpx.get(f"{server.address}/health", timeout=10).status_code == 200
            seconds.append(time.monotonic() - start)

    thread = Thread(target=look)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()


def test_silent_connections_leave_for_others(demo_home: Path) -> None:
    with server_process(demo_home, files=FILES) as server:
        server.ask("demo:bf16")
        with watched(server) as seconds, silent(server, 1100):
            assert server.descriptors < FILES * 3 // 4
            assert server.ask("demo:bf16")["response"] == "42"
            time.sleep(1)
        lines = server.log.read_text().splitlines()
    assert len(seconds) > 5
    assert sorted(seconds)[len(seconds) // 2] < 1
    assert max(seconds) < 5  # this machine may be busy
    assert any("closed" in line for line in lines)
    assert len(lines) < 20


@pytest.mark.full
def test_models_share_the_files_of_experts(tmp_path: Path) -> None:
    """A bound per model would take 8 · 72 descriptors; together they keep a quarter of 128."""
    make_checkpoint(tmp_path / "checkpoint", config(2, 36, 64, 32, 4))
    names = [f"m{number}:bf16" for number in range(8)]
    for name in names:
        pull(tmp_path / "checkpoint", Settings(tmp_path), name)
    with server_process(tmp_path, files=128) as server:
        first = [server.ask(name)["response"] for name in names]
        assert len(server.loaded()) == len(names)
        assert server.open_files("experts") <= 128 // 4 + 8
        with watched(server) as seconds, silent(server, 30):
            assert [server.ask(name)["response"] for name in names] == first
        assert server.descriptors < 128
        lines = server.log.read_text().splitlines()
    assert max(seconds) < 5
    assert not any("Traceback" in line for line in lines)


@pytest.mark.full
def test_a_bound_that_is_reached_by_requests(demo_home: Path) -> None:
    """Where every connection has a request, a new one is closed at once."""
    body = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    with server_process(demo_home, files=64) as server, ExitStack() as stack:
        connections = []
        for _ in range(40):
            (one,) = stack.enter_context(silent(server, 1))
            with suppress(OSError):
                one.sendall(body)
            connections.append(one)
            time.sleep(0.05)
        for one in connections:
            one.settimeout(0.1)
        assert 6 <= sum(map(hung_up, connections)) <= 10
        for one in connections[:8]:
            one.close()
        time.sleep(1)
        assert httpx.get(f"{server.address}/health", timeout=10).status_code == 200
