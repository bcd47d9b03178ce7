"""A limited child process: its answers, and its end when it exceeds a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime import limited_process
from moeinf.runtime.limited_process import LimitedProcess, LimitExceeded, Refused

resource = pytest.importorskip("resource", reason="needs limits of processes, which Windows lacks")
_CHILD = """
import ctypes, os, time
from moeinf.runtime.limited_process import serve

class Panic(BaseException):
    pass

started = []

def handler(request):
    match request["do"]:
        case "begin": started.append(request["with"])
        case "said": return started
        case "say": started.append(request["with"])
        case "panic": raise Panic("index out of range")
        case "fail": raise ValueError("x" * 10_000)
        case "allocate": return len(bytearray(1 << 30))
        case "sleep": time.sleep(60)
        case "crash": ctypes.string_at(0)
        case "talk": return "x" * (17 << 20)

serve(handler, 512 << 20)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedProcess]:
    (tmp_path / "limited_child.py").write_text(_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = LimitedProcess("limited_child", {"do": "begin", "with": 7})
    yield process
    process.close()


@pytest.mark.parametrize(
    ("do", "words"),
    [("panic", "Panic: index"), ("fail", "ValueError: x"), ("allocate", "too much memory")],
)
def test_a_refusal_leaves_the_child_as_it_was(child: LimitedProcess, do: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as refusal:
        child.ask({"do": do}, 20)
    assert len(str(refusal.value)) <= 500
    assert child.ask({"do": "said"}, 20) == [7]


@pytest.mark.parametrize("do", ["sleep", "crash", "talk"])
def test_a_child_that_exceeds_a_limit_is_replaced(child: LimitedProcess, do: str) -> None:
    assert child.ask({"do": "said"}, 20) == [7]
    start = time.monotonic()
    with pytest.raises(LimitExceeded):
        child.ask({"do": do}, 2)
    assert time.monotonic() - start < 10
    assert child.ask({"do": "said"}, 20) == [7]  # a new child, started in the same way


def test_a_copy_has_its_own_state_and_its_own_end(child: LimitedProcess) -> None:
    assert child.ask({"do": "said"}, 20) == [7]
    one, other = child.copy(), child.copy()
    one.ask({"do": "say", "with": 8}, 20)
    assert one.ask({"do": "said"}, 20) == [7, 8]
    one.start({"do": "sleep"}, 20)
    assert not one.done(0.05)
    assert other.ask({"do": "said"}, 20) == [7]  # while the first one is busy
    with pytest.raises(LimitExceeded):
        other.ask({"do": "crash"}, 20)
    one.close()
    for lost in (one, other):  # a copy is not restarted: its state is lost
        with pytest.raises(LimitExceeded):
            lost.ask({"do": "said"}, 20)
    assert child.ask({"do": "said"}, 20) == [7]


def test_a_copy_of_a_child_that_has_died(child: LimitedProcess) -> None:
    assert child.ask({"do": "said"}, 20) == [7]
    child._process.kill()
    child._process.wait()
    with pytest.raises(LimitExceeded):
        child.copy()
    assert child.ask({"do": "said"}, 20) == [7]
    child.copy().close()


@pytest.mark.linux("reads /proc")
def test_a_copy_ends_with_its_parent(child: LimitedProcess) -> None:
    """Its channel then closes, as when the parent is killed."""
    child.ask({"do": "said"}, 20)
    copy = child.copy()
    pid = child._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    assert len(children.read_text().split()) == 1
    copy._channel.close()
    until = time.monotonic() + 10
    while children.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    assert not children.read_text()
    copy.close()


def test_a_refusal_leaves_no_alarm_behind() -> None:
    """An alarm would end a child that waits for its next request."""

    def refuse(request: dict[str, Any]) -> None:
        raise ValueError("no")

    answer = limited_process._answer(refuse, {"request": {}, "alarm": 5})
    assert answer == {"error": "ValueError: no"}
    assert signal.alarm(0) == 0


def test_descriptors_beyond_1024_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with many connections has them; select.select refuses them."""
    (tmp_path / "limited_child.py").write_text(_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1200:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.dup(0) for _ in range(1050)]
    try:
        process = LimitedProcess("limited_child", {"do": "begin", "with": 7})
        assert process._channel.fileno() > 1024
        assert process.ask({"do": "said"}, 20) == [7]
        process.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_that_does_not_read_is_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request larger than a pipe's buffer would block the parent forever."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **pipes: start(["sleep", "60"], **pipes))
    process = LimitedProcess("unused")
    process._ready = True
    begun = time.monotonic()
    with pytest.raises(LimitExceeded):
        process.ask({"text": "x" * (1 << 20)}, 1)
    assert time.monotonic() - begun < 10
    process.close()


def test_the_time_of_a_long_request_begins_when_it_is_sent(child: LimitedProcess) -> None:
    """The parent may do other work while the pipe is full."""
    child.ask({"do": "said"}, 20)
    child.start({"do": "said", "text": "x" * (4 << 20)}, 2)
    time.sleep(2.2)
    assert child.result() == [7]
