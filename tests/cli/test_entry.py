"""Test the end of the process: exit codes, exit functions, threads, and buffers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, environment

ENDS = """
import atexit, sys, tempfile, threading, time
from moeinf.cli import main as command
from moeinf.cli.entry import main

class Loud:
    def __del__(self):
        sys.stderr.write("taken apart")

def work():
    time.sleep(0.3)
    sys.stdout.write("thread, ")

def answer(*arguments):
    code = command_answer(*arguments)
    threading.Thread(target=work).start()
    return code

command_answer, command.answer = command.answer, answer
kept = Loud()
folder = tempfile.TemporaryDirectory(dir=sys.argv.pop())
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
atexit.register(sys.stdout.write, "exit function")
main()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["list"], 0), (["show", "nothing"], 1)])
def test_an_end_leaves_nothing_undone(arguments: list[str], code: int, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *arguments, str(folder)],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stdout.endswith("thread, exit function")
    assert list(folder.iterdir()) == []
    assert "taken apart" not in done.stderr  # nor is torch, which would take 0.7 s


DROPPED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
from moeinf.cli import main as command
from moeinf.cli.chat.signals import stoppable
from moeinf.cli.entry import main

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)

def answer(_):
    try:
        with stoppable():
            Late()
            time.sleep(30)
    except KeyboardInterrupt:
        return 130
    return 0

command.answer = answer
main()
"""


def test_sigterm_in_a_finaliser_where_sigint_is_ignored(tmp_path: Path) -> None:
    """Python drops what a finaliser raises."""
    done = subprocess.run(
        [sys.executable, "-c", DROPPED],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_closed_stream(stream: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {stream}>&-', "sh", *COMMAND, "list"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_left(tmp_path: Path) -> None:
    line = '{ "$@"; echo $? >&2; } | true'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, "help"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr in ("0\n", "1\n")  # 0: it wrote before the reader left


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_of_torch_wait_asleep(given: str | None, tmp_path: Path) -> None:
    """The user's own choice stays."""
    show = (
        "import os\nfrom moeinf.cli import main as command\nfrom moeinf.cli.entry import main\n"
        "command.answer = lambda _: print(os.environ['OMP_WAIT_POLICY']) or 0\nmain()\n"
    )
    variables = environment(tmp_path)
    del variables["OMP_WAIT_POLICY"]  # tests/conftest.py sets it, too
    outer = {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run(
        [sys.executable, "-c", show],
        env={**variables, **outer}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == [given or "PASSIVE"]
