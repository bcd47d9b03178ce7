"""Answers count in the budget of bodies until they are read, and their readers must read."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.server.http import answer_bytes
from moeinf.server.http.answer_bytes import AnswerBytes
from moeinf.server.http.bodies import ALL_BODIES_BYTES, FREE_BYTES, MOST_BODY_BYTES, Budget
from moeinf.server.serve import make_server

START = {"type": "http.response.start", "status": 200}


class Sent:
    """An ASGI `send` that a reader can hold up."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.takes = asyncio.Event()
        self.takes.set()
        self.refused = 0

    async def __call__(self, message: Any) -> None:
        await self.takes.wait()
        self.messages.append(message)

    async def refuse(self) -> None:
        self.refused += 1


async def whole(answer: AnswerBytes, body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await answer.send({**START, "headers": [length]})
    await answer.send({"type": "http.response.body", "body": body})


def test_a_whole_answer_counts_until_it_is_written() -> None:
    async def play() -> None:
        budget, sent, body = Budget(), Sent(), bytes(range(256)) * 4000
        answer = AnswerBytes(sent, budget, sent.refuse)
        await whole(answer, body)
        assert budget.held_bytes == len(body) - FREE_BYTES
        answer.close()
        answer.close()
        assert budget.held_bytes == sent.refused == 0
        parts = sent.messages[1:]
        assert b"".join(part["body"] for part in parts) == body
        assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
        assert max(len(part["body"]) for part in parts) <= 64 << 10

    asyncio.run(play())


def test_an_answer_without_room_is_refused_and_a_stream_waits() -> None:
    async def play() -> None:
        budget, sent = Budget(), Sent()
        assert budget.take(ALL_BODIES_BYTES)
        refused = AnswerBytes(sent, budget, sent.refuse)
        await whole(refused, bytes(1 << 20))
        refused.close()
        assert (sent.refused, sent.messages) == (1, [])
        small = AnswerBytes(sent, budget, sent.refuse)
        await whole(small, b"{}")
        assert sent.messages[-1]["body"] == b"{}"
        stream = AnswerBytes(sent, budget, sent.refuse)
        await stream.send({**START, "headers": []})
        part = {"type": "http.response.body", "body": bytes(1 << 20), "more_body": True}
        waits = asyncio.create_task(stream.send(part))
        await asyncio.sleep(3 * answer_bytes._LOOK_S)
        assert not waits.done()
        budget.give_back(ALL_BODIES_BYTES)
        await waits
        assert budget.held_bytes == 0

    asyncio.run(play())


def test_one_answer_alone_is_always_sent() -> None:
    async def play() -> None:
        budget, sent = Budget(), Sent()
        assert budget.take(MOST_BODY_BYTES)
        answer = AnswerBytes(sent, budget, sent.refuse)
        await whole(answer, bytes(2 * ALL_BODIES_BYTES))
        assert (sent.refused, budget.held_bytes) == (0, ALL_BODIES_BYTES)

    asyncio.run(play())


@contextmanager
def served(app: Any, home: Path) -> Iterator[int]:
    """Serve an ASGI app on a socket as the command does, and yield its port."""
    server = make_server(Settings(home), ServerSettings(port=0), EngineConfig(), app=app)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield sock.getsockname()[1]
        server.should_exit = server.force_exit = True
        thread.join(20)


def asked(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", port))
    sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return sock


@pytest.mark.parametrize("streamed", [True, False])
def test_a_reader_that_takes_nothing_is_dropped(
    streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_bytes, "READ_SECONDS", 0.6)
    gone = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        length = [] if streamed else [(b"content-length", b"%d" % (64 << 20))]
        await send({**START, "headers": length})
        part = {"type": "http.response.body", "body": bytes(64 << 10), "more_body": True}
        watch = asyncio.create_task(receive())  # the request's body, and then its end
        for _ in range(1024):
            await send(part)
            await asyncio.sleep(0)
            if watch.done():
                if watch.result()["type"] == "http.disconnect":
                    gone.set()
                    return
                watch = asyncio.create_task(receive())
        await send({**part, "body": b"", "more_body": False})

    with served(app, tmp_path) as port, asked(port) as slow, asked(port) as still:
        start = time.monotonic()
        read = 0
        while not gone.is_set():
            assert time.monotonic() - start < 15
            read += len(slow.recv(64 << 10))  # this one goes on
            time.sleep(0.02)
        assert read > 64 << 10
        assert slow.recv(1024)
        total = 0
        with suppress(ConnectionResetError):
            while part := still.recv(1 << 20):
                total += len(part)
        assert total < 64 << 20
