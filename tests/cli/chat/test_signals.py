"""Test Ctrl-C at any time: exit code 130, no traceback.

test_run and test_repl test it while a model answers.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, environment

# Sends SIGINT to itself just before a module is imported: an outside signal may come too late.
AT_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
from moeinf.cli.entry import main
main()
"""


@pytest.mark.parametrize("module", ["importlib.metadata", "rich.console", "moeinf.cli.output"])
def test_while_it_is_imported(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT.format(module=module), "list"],
        env=environment(tmp_path), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130, f"lost, or {module} is not imported any more"
    assert done.stdout == done.stderr == b""


# torch has done so while it imports numpy: the half-imported module then fails.
SWALLOWED = """
import os, signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "moeinf.cli.chat.local":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise AttributeError("module 'numpy' has no attribute 'matrix'") from None

sys.meta_path.insert(0, Finder)
from moeinf.cli.entry import main
main()
"""


def test_an_import_that_swallows_it(demo_home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED, "run", "demo", "17+25="],
        env=environment(demo_home), stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


BEGINS = "import os; from moeinf.cli.entry import main; os.write(2, b'.'); main()"


@pytest.mark.parametrize("delay_s", [0.3, 0.6, 1.0, 1.5])
def test_while_a_model_loads(delay_s: float, demo_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGINS, "run", "demo", "17+25=", "--memory", "30%"],
        env=environment(demo_home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stderr is not None
    assert process.stderr.read(1) == b"."  # Python itself starts slowly on a busy machine
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (0, 130)  # 0: it was quicker
    assert b"Traceback" not in err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_ignores_interrupts_for_us_is_obeyed(tmp_path: Path) -> None:
    shell = subprocess.run(
        ["sh", "-c", 'trap "" INT; "$@" & wait $!', "sh", *COMMAND, "list"],
        env=environment(tmp_path),
        capture_output=True,
        check=True,
    )
    assert shell.stdout.startswith(b"NAME")
