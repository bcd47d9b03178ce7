"""Test what a first stage may ask that has the key and is hostile, and what a stage may answer."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch

from moeinf.runtime.checkpoints.finite import NotFiniteLogits, check_logits
from moeinf.runtime.engine.pipeline import links
from moeinf.runtime.engine.pipeline.cut import CannotCut
from moeinf.runtime.engine.pipeline.greeting import GREET_S, MOST_GREETED
from moeinf.runtime.engine.pipeline.links import StageLost, StagesDiffer
from moeinf.runtime.engine.pipeline.messages import About, Begin, Pass, Reply, Rows, bytes_of
from moeinf.runtime.engine.pipeline.wire import Lost, Wire
from tests.runtime.engine.pipeline.stages import Running, opened, works


def asking(running: Running, context: int = 64) -> tuple[Wire, About]:
    """Connect as a first stage that may ask anything."""
    host, port = running.address.split(":")
    wire = Wire(socket.create_connection((host, int(port))), 10)
    wire.prove(None, first=True)
    about = wire.receive(About)
    wire.send(Begin(context))
    return wire, about


@pytest.mark.parametrize(
    "rows",
    [
        [Rows(2, 0, 0, 1)],  # more states than it takes
        [Rows(0, 0, 1, 1)],  # after tokens that it does not have
        [Rows(0, 0, 1 << 40, 1)],
        [Rows(0, 0, 0, 65)],  # beyond the context
        [Rows(0, 0, 0, 8192), Rows(1, 0, 0, 8192)],  # beyond its window
        [Rows(0, 0, 0, 1), Rows(0, 0, 0, 1)],  # a state twice
    ],
)
def test_impossible_passes(rows: list[Rows], demo_home: Path, running: Running) -> None:
    wire, _ = asking(running)
    wire.send(Pass(1, tuple(rows), False))
    with pytest.raises(Lost, match=r"hung up|reset"):
        wire.receive(Reply)
    wire.close()
    assert "it asks for" in running.told[-1]
    works(demo_home, running.address)


def test_a_context_beyond_its_memory(running: Running) -> None:
    wire, about = asking(running, context=1 << 40)
    with pytest.raises(Lost, match=r"hung up|reset"):
        wire.receive(Reply)
    wire.close()
    assert f"more than {about.context}" in running.told[-1]


def test_states_of_any_bytes(demo_home: Path, running: Running) -> None:
    """Numbers are only computed with: NaN goes in and out."""
    wire, _ = asking(running)
    width = running.stage.part.hidden_width
    x = torch.full((2, width), float("nan"), dtype=torch.bfloat16)
    wire.send(Pass(1, (Rows(0, 0, 0, 2),), False), bytes_of(x))
    reply = wire.receive(Reply)
    assert reply.number == 1
    wire.close()
    works(demo_home, running.address)


@pytest.mark.parametrize("sent", [b"", b"moeinf-st", b"GET / HTTP/1.1\r\n\r\n"])
def test_silent_connections_delay_no_other(sent: bytes, demo_home: Path, running: Running) -> None:
    """More of them than are greeted at a time; each is dropped after two seconds."""
    host, port = running.address.split(":")
    with ExitStack() as kept:
        ends = [
            kept.enter_context(socket.create_connection((host, int(port))))
            for _ in range(MOST_GREETED + 10)
        ]
        for end in ends:
            end.sendall(sent)
        since = time.monotonic()
        wire, _ = asking(running)
        assert time.monotonic() - since < 4 * GREET_S
        wire.close()
        for end in ends:
            end.settimeout(10 * GREET_S)
            with suppress(ConnectionError):
                while end.recv(1024):
                    pass
    works(demo_home, running.address)


def test_first_stages_that_left_while_they_waited(demo_home: Path, running: Running) -> None:
    """They have proved the key, and another one was served."""
    served, _ = asking(running)
    host, port = running.address.split(":")
    for _ in range(20):
        wire = Wire(socket.create_connection((host, int(port))), 10)
        wire.prove(None, first=True)
        wire.close()
    served.close()
    works(demo_home, running.address)
    assert sum(line.startswith("connected with") for line in running.told) < 4


def test_random_messages(demo_home: Path, running: Running) -> None:
    """No bytes behind the key end a stage. Lengths are often right, so that bodies are parsed."""
    draw, right = random.Random(5), msgspec.msgpack.encode(Pass(1, (Rows(0, 0, 0, 1),), False))
    for number in range(60):
        wire, _ = asking(running)
        with suppress(Lost):  # it may have hung up already
            for _ in range(draw.randrange(1, 5)):
                body = bytearray(right if number % 2 else draw.randbytes(draw.randrange(80)))
                for _ in range(draw.randrange(4)):
                    if body:
                        body[draw.randrange(len(body))] = draw.randrange(256)
                wire._send(struct.pack(">I", len(body)) + body)
                wire._send(draw.randbytes(draw.randrange(600)))
        wire.close()
    works(demo_home, running.address)


def test_an_error_that_nothing_expects(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the connection and not the stage, which took long to load."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty", broken)
    wire, _ = asking(running)
    wire.send(Pass(1, (Rows(0, 0, 0, 1),), False))
    with pytest.raises(Lost):
        wire.receive(Reply)
    wire.close()
    monkeypatch.undo()
    assert "can't allocate memory" in running.told[-1]
    works(demo_home, running.address)


Answers = Callable[[Wire, Pass, bytes], None]


@contextmanager
def lying(running: Running, answers: Answers, **about: object) -> Iterator[str]:
    """Yield the address of a stage that tells other facts of itself, or answers what it likes."""
    wire, real = asking(running)
    wire.close()
    width = running.stage.part.hidden_width * running.stage._dtype.itemsize

    def serve() -> None:
        with suppress(Lost, OSError):
            end = Wire(door.accept()[0])
            try:
                end.prove(None, first=False)
                end.send(msgspec.structs.replace(real, **about))
                end.receive(Begin)
                while True:
                    asked = end.receive(Pass)
                    x = bytearray(width * sum(rows.count for rows in asked.rows))
                    end.receive_into(memoryview(x))
                    answers(end, asked, bytes(x))
            finally:
                end.close()

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{door.getsockname()[1]}"
        with suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()


def _nothing(*_: object) -> None:
    raise AssertionError("a pass was sent")


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        ({"version": "\x1b[2J"}, StagesDiffer),
        ({"digest": ""}, StagesDiffer),
        ({"first": 4, "stop": 4}, StagesDiffer),
        ({"first": 5, "stop": 3}, StagesDiffer),
        ({"first": 3, "stop": 1 << 40}, StagesDiffer),
        ({"first": 1 << 40}, CannotCut),
        ({"first": 0}, StagesDiffer),
        ({"parallel": 0}, StagesDiffer),
        ({"window": 0}, StageLost),
        ({"window": 1 << 20}, StageLost),
    ],
)
def test_facts_that_cannot_be(
    about: dict[str, object],
    kind: type[Exception],
    demo_home: Path,
    running: Running,
) -> None:
    with lying(running, _nothing, **about) as address:
        with pytest.raises(kind) as found:
            opened(demo_home, address)
        assert "\x1b" not in str(found.value)


def _other_number(wire: Wire, asked: Pass, x: bytes) -> None:
    wire.send(Reply(asked.number + 1, "done"), memoryview(x))


def _too_short(wire: Wire, asked: Pass, x: bytes) -> None:
    wire.send(Reply(asked.number, "done"), memoryview(x[:-1]))
    wire.close()


def _garbage(wire: Wire, _: Pass, x: bytes) -> None:
    wire._send(b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1")


def _huge(wire: Wire, _: Pass, x: bytes) -> None:
    wire._send(b"\xff\xff\xff\xff")


@pytest.mark.parametrize("answers", [_other_number, _too_short, _garbage, _huge])
def test_answers_that_cannot_be(answers: Answers, demo_home: Path, running: Running) -> None:
    with lying(running, answers) as address, opened(demo_home, address) as engine:
        with pytest.raises(StageLost):
            engine.extend(engine.new_state(), [5])
        assert engine.lost


def test_states_that_are_no_numbers(demo_home: Path, running: Running) -> None:
    """They become logits that are refused before a token is chosen."""

    def nan(wire: Wire, asked: Pass, x: bytes) -> None:
        wire.send(Reply(asked.number, "done"), memoryview(b"\xff" * len(x)))

    with lying(running, nan) as address, opened(demo_home, address) as engine:
        with pytest.raises(NotFiniteLogits):
            check_logits(engine.extend(engine.new_state(), [5]))
        assert not engine.lost


def test_a_stage_that_is_busy_for_ever(
    demo_home: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is stopped ends all the same."""
    monkeypatch.setattr(links, "SILENCE_S", 0.5)
    over = threading.Event()

    def busy(wire: Wire, asked: Pass, x: bytes) -> None:
        while asked.rows:
            wire.send(Reply(asked.number, "busy"))
            over.wait(0.01)

    with lying(running, busy) as address, opened(demo_home, address) as engine:
        threading.Timer(0.8, over.set).start()
        with engine.stoppable(over.is_set), pytest.raises(StageLost, match="does not stop"):
            engine.extend(engine.new_state(), [5])
        assert engine.lost
