"""What a child with limits answers, and what happens to one that takes too much."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeinf.runtime.limited_process import LimitedProcess, LimitExceeded, Refused

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
    assert child.ask({"do": "said"}, 20) == [7]  # a new one, begun in the same way


def test_a_child_that_does_not_read_is_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request larger than a pipe holds would block the parent for ever."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **pipes: start(["sleep", "60"], **pipes))
    process = LimitedProcess("unused")
    process._ready = True
    begun = time.monotonic()
    with pytest.raises(LimitExceeded):
        process.ask({"text": "x" * (1 << 20)}, 1)
    assert time.monotonic() - begun < 10
    process.close()
