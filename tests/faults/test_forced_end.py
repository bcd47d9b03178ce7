"""SIGTERM ends a server in time, also while a thread holds the interpreter's lock."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import environment

SERVER = """
import re, sys, threading
from moeinf.cli.entry import main
from moeinf.server import serve

def hold():
    sys.stdin.readline()
    re.match("(a+)+$", "a" * 64 + "b")  # for years

serve._END_SECONDS = 2.0
threading.Thread(target=hold, daemon=True).start()
sys.argv = ["moeinf", "serve", "--port", "0"]
main()
"""


@pytest.mark.linux("sends signals")
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_thread_that_holds_the_lock(kind: signal.Signals, demo_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment(demo_home),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        assert any("listening on" in line for line in process.stderr)
        time.sleep(1)  # until signals are handled
        process.stdin.write("now\n")
        process.stdin.flush()
        time.sleep(0.5)
        begun = time.monotonic()
        process.send_signal(kind)
        assert process.wait(8) == 1
        assert time.monotonic() - begun > 1.5  # the thread did hold it
    finally:
        process.kill()
        process.communicate()
