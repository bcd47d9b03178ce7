"""Test that `run` answers in time with any listener at MOEINF_HOST, and sends no key to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moeinf.cli.chat import server_check as looking
from moeinf.cli.chat.client import Client, ServerError
from moeinf.cli.chat.server_check import look
from moeinf.cli.main import answer
from moeinf.runtime.library.processes import Registry
from moeinf.runtime.version import version
from tests.cli.conftest import command_in

KEY = "a-secret-key"
LOOK_S = 0.5


def _http(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def _sends(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


def _repeats(data: bytes, every_s: float = 0.0) -> Callable[[socket.socket], None]:
    def speak(connection: socket.socket) -> None:
        while True:
            connection.sendall(data)
            time.sleep(every_s)

    return speak


def _answers(*answers: bytes) -> Callable[[socket.socket], None]:
    """Return a function that sends the answers in order, one per request."""

    def speak(connection: socket.socket) -> None:
        for said in answers:
            connection.sendall(said)
            connection.recv(65536)

    return speak


HELLO = _http(b"moeinf is running")
VERSION = _http(json.dumps({"version": version()}).encode())
MODES: dict[str, Callable[[socket.socket], None]] = {
    "silence": lambda _: time.sleep(60),
    "closes": lambda connection: connection.close(),
    "drips bytes": _repeats(b"H", 0.05),
    "drips headers": _repeats(b"X-A: b\r\n", 0.05),
    "drips a body": lambda c: (c.sendall(HELLO[:-9]), _repeats(b"", 0.05)(c))[1],
    "endless line": _repeats(b"a" * 65536),
    "endless headers": lambda c: (c.sendall(b"HTTP/1.1 200 OK\r\n"), _repeats(b"A: b\r\n")(c))[1],
    "endless body": lambda c: (c.sendall(b"HTTP/1.1 200 OK\r\n\r\n"), _repeats(b"a" * 65536)(c))[1],
    "endless 100": _repeats(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "ssh": _sends(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "tls": _sends(b"\x15\x03\x01\x00\x02\x02\x46"),
    "zeros": _sends(bytes(4096)),
    "bad length": _sends(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nmoeinf is running"),
    "bad chunks": _sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx"),
    "another product": _sends(_http(b"Ollama is running")),
    "redirect": _sends(_http(b"", "302 Found", "Location: http://127.0.0.1:9/\r\n")),
    "refuses": _sends(_http(b"{}", "401 Unauthorized")),
    "fails": _sends(_http(b"\xff\xfe", "500 Oops")),
    "version is no JSON": _answers(HELLO, _http(b"{")),
    "version is a list": _answers(HELLO, _http(b"[1]")),
    "version is deep": _answers(HELLO, _http(b"[" * 100000)),
    "version is a number": _answers(HELLO, _http(b'{"version": 1}')),
    "show is a list": _answers(HELLO, VERSION, _http(b"[]")),
    "show without a model": _answers(HELLO, VERSION, _http(b'{"capabilities": ["completion"]}')),
    "show with a number": _answers(HELLO, VERSION, _http(b'{"capabilities": 1, "model": 2}')),
    "show hangs": _answers(HELLO, VERSION),
}


class Listener:
    """A socket that runs `speak` for each connection, and keeps the received bytes."""

    def __init__(self, speak: Callable[[socket.socket], None]) -> None:
        self._speak = speak
        self.heard = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            self.heard += connection.recv(65536)
            self._speak(connection)
            while data := connection.recv(65536):
                self.heard += data

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Listener]]:
    monkeypatch.setattr(looking, "LOOK_S", LOOK_S)
    monkeypatch.setattr(looking, "KNOWN_LOOK_S", 2 * LOOK_S)
    made: list[Listener] = []

    def start(speak: Callable[[socket.socket], None]) -> Listener:
        made.append(Listener(speak))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_look_ends_in_time_and_tells_no_key(
    mode: str, listen: Callable[..., Listener], tmp_path: Path
) -> None:
    listener = listen(MODES[mode])
    client = Client.of("127.0.0.1", listener.port, KEY, Registry(tmp_path / "run"))
    before = time.monotonic()
    found = look(client, "demo")
    assert time.monotonic() - before < LOOK_S + 1.0
    assert found.about is None
    assert not found.silent
    assert f"127.0.0.1:{listener.port}" in found.reason
    assert KEY.encode() not in listener.heard


def test_nothing_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = look(Client.of("127.0.0.1", port, KEY, Registry(tmp_path)), "demo")
    assert (found.about, found.silent) == (None, True)


SHOWN = _http(b'{"model": "demo:bf16", "capabilities": ["completion"]}')


def test_the_key_goes_to_a_listener_that_has_proved_itself(
    listen: Callable[..., Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path / "run")
    listener = listen(_answers(HELLO, VERSION, SHOWN))
    monkeypatch.setattr(looking, "KNOWN_LOOK_S", 20.0)
    for proof, trusted in ((None, False), (None, True), (f"127.0.0.1:{listener.port}", False)):
        entry = None if proof is None else registry.register_server(proof)
        listener.heard = b""
        client = Client.of("localhost", listener.port, KEY, registry, trusted)
        known = trusted or proof is not None
        assert (look(client, "demo").about is not None) == known
        assert (KEY.encode() in listener.heard) == known
        if entry is not None:
            entry.close()
    # The server has ended: a listener there gets no key now, not even from an older client.
    listener.heard = b""
    assert look(client, "demo").about is None
    assert KEY.encode() not in listener.heard
    assert b"demo" not in listener.heard
    with pytest.raises(ServerError, match="not one of this home"):
        client.post("/api/chat", {"messages": [{"content": "a secret"}]})
    assert b"secret" not in listener.heard


def test_run_tells_a_stranger_nothing(listen: Callable[..., Listener], demo_home: Path) -> None:
    """It needs no key, and answers as a server of moeinf does: another user of the machine."""
    chat = _http(b'{"message": {"content": "wrong"}, "done": true}')
    listener = listen(_answers(HELLO, VERSION, SHOWN, chat))
    here = {"MOEINF_HOST": f"127.0.0.1:{listener.port}", "MOEINF_API_KEY": KEY}
    moeinf = command_in(demo_home)
    done = moeinf("run", "demo", "17+25=", **here)
    assert (done.code, done.out) == (0, "42\n"), done.err
    assert "is not one of this home" in done.err
    for told in (KEY, "17+25", "demo"):
        assert told.encode() not in listener.heard
    launched = moeinf("launch", "codex", "demo", **here)
    assert launched.code == 1
    assert "gets no MOEINF_API_KEY" in launched.err
    trusted = moeinf("run", "demo", "17+25=", "--server", **here)
    assert KEY.encode() in listener.heard
    assert trusted.out != "42\n"


def test_a_server_that_needs_the_key_and_has_not_proved_itself(
    listen: Callable[..., Listener], tmp_path: Path
) -> None:
    listener = listen(_answers(HELLO, VERSION, _http(b'{"error": "x"}', "401 Unauthorized")))
    client = Client.of("127.0.0.1", listener.port, KEY, Registry(tmp_path / "run"))
    assert "--server" in look(client, "demo").reason
    assert KEY.encode() not in listener.heard


@pytest.mark.parametrize("document", [b"[1]\n", b"1\n", b"nonsense\n", b"[" * 100000 + b"\n"])
def test_answers_that_are_none(document: bytes, listen: Callable[..., Listener]) -> None:
    listener = listen(_answers(_http(document)))
    client = Client("127.0.0.1", listener.port)
    with pytest.raises(ServerError):
        list(client.lines("/api/chat", {}, lambda: False))


def test_run_falls_back_to_its_own_engine(
    listen: Callable[..., Listener],
    demo_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    listener = listen(MODES["drips bytes"])
    monkeypatch.setenv("MOEINF_HOME", str(demo_home))
    monkeypatch.setenv("MOEINF_HOST", f"127.0.0.1:{listener.port}")
    monkeypatch.setenv("MOEINF_API_KEY", KEY)
    assert answer(["run", "demo", "17+25="]) == 0
    said = capsys.readouterr()
    assert said.out == "42\n"
    assert f"no moeinf server at http://127.0.0.1:{listener.port}" in said.err
    assert answer(["run", "demo", "17+25=", "--server"]) == 1
