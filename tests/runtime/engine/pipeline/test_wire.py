"""Test the connection: the key, bounded messages, and what a hostile side may send."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from moeinf.runtime.engine.pipeline import wire as module
from moeinf.runtime.engine.pipeline.address import parse_address
from moeinf.runtime.engine.pipeline.messages import About, Begin, Pass, Rows
from moeinf.runtime.engine.pipeline.wire import Lost, Wire
from moeinf.runtime.invalid import InvalidValue

KEY = "0123456789abcdef"


Ends = tuple[Wire, Wire, socket.socket]
Pair = Callable[..., Ends]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return a function that makes both ends of a connection, and the socket of the second one."""
    with ExitStack() as opened:

        def made(silence_s: float = 5.0) -> Ends:
            with socket.create_server(("127.0.0.1", 0)) as door:
                one = opened.enter_context(socket.create_connection(door.getsockname()))
                other = opened.enter_context(door.accept()[0])
            return Wire(one, silence_s), Wire(other, silence_s), other

        yield made


def proved(ends: Ends, first: str | None, stage: str | None) -> list[str]:
    """Return what both sides say of each other, the first one before the stage."""
    found = ["", ""]

    def prove(number: int, key: str | None) -> None:
        try:
            ends[number].prove(key, first=number == 0)
        except Lost as error:
            found[number] = str(error)
            ends[number].close()

    thread = threading.Thread(target=prove, args=(1, stage))
    thread.start()
    prove(0, first)
    thread.join()
    return found


def test_both_sides_prove_the_key(pair: Pair) -> None:
    assert proved(pair(), KEY, KEY) == ["", ""]
    assert proved(pair(), None, None) == ["", ""]
    for first, stage in ((KEY, KEY[:-1] + "x"), (None, KEY), (KEY, None)):
        told = proved(pair(), first, stage)
        assert "another MOEINF_STAGE_KEY" in told[1]
        assert told[0], "the stage has not proved anything"


def test_a_stage_without_the_key_is_not_believed(pair: Pair) -> None:
    ours, _, theirs = pair()
    theirs.sendall(b"moeinf-stage-02\n" + bytes(32) + bytes(32))
    with pytest.raises(Lost, match="another MOEINF_STAGE_KEY"):
        ours.prove(KEY, first=True)


def test_an_echo_proves_nothing(pair: Pair) -> None:
    """A peer that sends back what it gets has no key, and both sides sign other words."""
    ours, _, theirs = pair()

    def echo() -> None:
        while data := theirs.recv(1 << 10):
            theirs.sendall(data)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    with pytest.raises(Lost, match="another MOEINF_STAGE_KEY"):
        ours.prove(KEY, first=True)
    ours.close()
    thread.join(5)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(64), bytes(99)])
def test_a_peer_of_another_protocol(data: bytes, pair: Pair) -> None:
    ours, _, theirs = pair()
    theirs.sendall(data)
    with pytest.raises(Lost, match="does not speak this protocol"):
        ours.prove(KEY, first=False)


def test_a_peer_that_says_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GREETING_S", 0.2)
    ours, _, theirs = pair()
    begin = time.monotonic()
    theirs.sendall(b"moe")
    with pytest.raises(Lost, match="does not answer"):
        ours.prove(KEY, first=False)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("size", [(64 << 10) + 1, 1 << 31, (1 << 32) - 1])
def test_a_huge_message_is_refused_before_it_comes(size: int, pair: Pair) -> None:
    ours, _, theirs = pair()
    theirs.sendall(struct.pack(">I", size))
    with pytest.raises(Lost, match=f"a message of {size} bytes"):
        ours.receive(Pass)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x93\x01\x02", bytes(range(128, 192)), b"\xdd\xff\xff\xff\xff"]
)
def test_garbage(body: bytes, pair: Pair) -> None:
    ours, _, theirs = pair()
    theirs.sendall(struct.pack(">I", len(body)) + body)
    with pytest.raises(Lost, match="an invalid message"):
        ours.receive(Pass)


def test_numbers_out_of_range(pair: Pair) -> None:
    rows = Rows(0, 0, 0, 1)
    for wrong in (
        Pass(-1, (rows,), False),
        Pass(0, (rows,) * 17, False),
        Pass(0, (Rows(16, 0, 0, 1),), False),
        Pass(0, (Rows(0, 0, -1, 1),), False),
        Pass(0, (Rows(0, 0, 0, 8193),), False),
        Pass(0, (Rows(0, 0, 0, 0),), False),
    ):
        ours, theirs, _ = pair()
        theirs.send(wrong)
        with pytest.raises(Lost, match="an invalid message"):
            ours.receive(Pass)
    ours, theirs, _ = pair()
    theirs.send(Begin(0))
    with pytest.raises(Lost):
        ours.receive(Begin)
    theirs.send(About("1", "", "x" * 1001, "", 0, 1, "full", 1, 1, 1))
    with pytest.raises(Lost):
        ours.receive(About)


def test_a_message_that_stops_within(pair: Pair) -> None:
    ours, _, theirs = pair(silence_s=0.2)
    theirs.sendall(struct.pack(">I", 9) + b"\x90")
    with pytest.raises(Lost, match="does not answer"):
        ours.receive(Pass)
    with pytest.raises(Lost, match="nothing has come from it"):
        ours.receive(Pass, 0.1)
    theirs.close()
    with pytest.raises(Lost, match="hung up"):
        ours.receive(Pass)


@pytest.mark.parametrize("text", ["7000", ":7000", "host:", "host:70000", "host:x", "host:-1"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(InvalidValue, match="expected HOST:PORT"):
        parse_address("--listen", text, KEY)


def test_other_machines_need_a_key() -> None:
    for text in ("0.0.0.0:7000", "box:7000", "[::]:7000", "192.0.2.1:7000"):
        for key in (None, KEY[:-1]):
            with pytest.raises(InvalidValue, match="MOEINF_STAGE_KEY"):
                parse_address("--listen", text, key)
        assert parse_address("--listen", text, KEY)[1] == 7000
    for text, host in (
        ("127.0.0.1:0", "127.0.0.1"),
        ("[::1]:0", "::1"),
        ("localhost:0", "localhost"),
    ):
        assert parse_address("--listen", text, None) == (host, 0)


def test_another_version_of_the_protocol(pair: Pair) -> None:
    ours, _, theirs = pair()
    theirs.sendall(b"moeinf-stage-01\n" + bytes(32))
    with pytest.raises(Lost, match="another version"):
        ours.prove(KEY, first=True)


def test_a_slow_network_may_take_longer_than_a_silence(pair: Pair) -> None:
    """Many states go in many parts; only a part that does not move ends the connection."""
    ours, _, end = pair(silence_s=0.5)
    for one, size in ((ours._end, socket.SO_SNDBUF), (end, socket.SO_RCVBUF)):
        one.setsockopt(socket.SOL_SOCKET, size, 64 << 10)
    sent, taken = bytes(range(256)) * (1 << 14), bytearray()

    def take() -> None:
        while len(taken) < len(sent):
            time.sleep(0.02)
            taken.extend(end.recv(64 << 10))

    thread = threading.Thread(target=take)
    thread.start()
    begin = time.monotonic()
    ours._send(memoryview(sent))
    thread.join()
    assert time.monotonic() - begin > 1.0, "it was not slow"
    assert taken == sent
    with pytest.raises(Lost, match="does not answer"):
        ours._send(memoryview(sent))  # nothing takes these


def test_a_connection_that_is_gone_is_lost() -> None:
    """Some systems refuse options of a connection that the other side has reset."""
    closed = socket.socket()
    closed.close()
    with pytest.raises(Lost):
        Wire(closed)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_a_machine_that_vanishes_is_noticed_within_a_silence(pair: Pair) -> None:
    _, _, end = pair(silence_s=7.0)
    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
