"""A hub whose answers have no end, or end at once: each request has a limit of time and tries."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub import constants

from moeinf.runtime.hub import http
from moeinf.runtime.hub.download import DownloadFailed, Fetcher, RemoteFile, fetch
from moeinf.runtime.hub.listing import RepositoryError, look_up
from moeinf.runtime.hub.patience import Patience

Speaks = Callable[[socket.socket], None]


def _repeats(first: bytes, data: bytes, every_s: float) -> Speaks:
    def speak(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(data)
            time.sleep(every_s)

    return speak


HEADS: dict[str, Speaks] = {
    "drips a line": _repeats(b"HTTP/1.1 200 OK\r\nX: ", b"a", 0.05),
    "drips headers": _repeats(b"HTTP/1.1 200 OK\r\n", b"X: a\r\n", 0.05),
    "endless 100": _repeats(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.005),
    "endless 103": _repeats(b"", b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n", 0.005),
    "silent": lambda connection: time.sleep(30),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Speaks], str]]:
    """Return a function that starts a hub, and returns its address."""
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.6)
    doors = list[socket.socket]()

    def talk(connection: socket.socket, speak: Speaks) -> None:
        with suppress(OSError), connection:
            connection.recv(65536)
            speak(connection)

    def accept(door: socket.socket, speak: Speaks) -> None:
        with suppress(OSError):
            while True:
                end, _ = door.accept()
                threading.Thread(target=talk, args=(end, speak), daemon=True).start()

    def start(speak: Speaks) -> str:
        doors.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=accept, args=(doors[-1], speak), daemon=True).start()
        address = f"http://127.0.0.1:{doors[-1].getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        return address

    yield start
    for door in doors:
        door.close()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_a_limit_of_time(name: str, hub: Callable[[Speaks], str]) -> None:
    hub(HEADS[name])
    before = time.monotonic()
    with pytest.raises(RepositoryError, match="the head of its answer takes longer"):
        look_up("Org/Model", None, None)
    assert time.monotonic() - before < 5


def test_redirects_share_the_limit(hub: Callable[[Speaks], str]) -> None:
    def speak(connection: socket.socket) -> None:
        time.sleep(0.3)
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n")

    hub(speak)
    with pytest.raises(RepositoryError, match="takes longer"):
        look_up("Org/Model", None, None)


def file_at(address: str, size: int) -> RemoteFile:
    return RemoteFile("x", size, f"{address}/x", "0" * 64, None)


def failed(address: str, size: int, folder: Path) -> tuple[str, int]:
    """Return why a download failed, and how often it has waited."""
    waits = list[float]()
    patience = Patience(4, 0.4, 0.0, lambda _, wait: waits.append(wait))
    with pytest.raises(DownloadFailed) as error:
        fetch(Fetcher(address, None, patience), file_at(address, size), folder, 1, lambda _: None)
    return str(error.value), len(waits)


@pytest.mark.parametrize("name", HEADS)
def test_a_download_ends(name: str, hub: Callable[[Speaks], str], tmp_path: Path) -> None:
    words, _ = failed(hub(HEADS[name]), 1 << 20, tmp_path)
    assert words.startswith("x: ")


@pytest.mark.parametrize("sent", [0, 1, 1000])
def test_a_hub_that_cuts_every_answer(
    sent: int, hub: Callable[[Speaks], str], tmp_path: Path
) -> None:
    """Some bytes of each answer are no reason to go on for ever."""
    place = 0

    def speak(connection: socket.socket) -> None:
        nonlocal place
        head = f"HTTP/1.1 206 P\r\nContent-Length: {(1 << 20) - place}\r\n"
        head += f"Content-Range: bytes {place}-{(1 << 20) - 1}/{1 << 20}\r\n\r\n"
        connection.sendall(head.encode() + bytes(sent))
        place += sent

    words, waits = failed(hub(speak), 1 << 20, tmp_path)
    assert "4 times in a row" in words
    assert waits == 3


def test_a_body_that_drips(hub: Callable[[Speaks], str], tmp_path: Path) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {1 << 20}\r\n\r\n"
    before = time.monotonic()
    words, _ = failed(hub(_repeats(head.encode(), b"a", 0.05)), 1 << 20, tmp_path)
    assert words.startswith("x: ")
    assert time.monotonic() - before < 10
