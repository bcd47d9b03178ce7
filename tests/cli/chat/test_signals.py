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

from tests.cli.conftest import COMMAND, command_in, environment

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


@pytest.mark.parametrize("module", ["msgspec", "rich.cells", "moeinf.cli.output"])
def test_while_it_is_imported(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT.format(module=module), "list"],
        env=environment(tmp_path), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 130, f"lost, or {module} is not imported any more"
    assert done.stdout == done.stderr == b""


# torch has done so while it imports numpy: the half-imported module fails then or later. Its C++
# code ends the process with SIGABRT instead.
SWALLOWED = """
import os, signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.{kind})
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Finder)
from moeinf.cli.entry import main
main()
"""


@pytest.mark.parametrize(
    ("module", "kind", "command"),
    [
        ("moeinf.cli.chat.local", "SIGINT", ["run", "demo", "17+25="]),
        ("moeinf.cli.chat.local", "SIGTERM", ["run", "demo", "17+25=", "--memory", "50%"]),
        ("numpy", "SIGINT", ["verify", "demo"]),
        ("moeinf.runtime.library.repacking.repack", "SIGINT", ["pull", "demo", "--name", "other"]),
    ],
)
def test_an_import_that_swallows_it(
    module: str, kind: str, command: list[str], demo_home: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED.format(module=module, kind=kind), *command],
        env=environment(demo_home), stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


# Python prints and drops an exception of a destructor.
DROPPED = """
import os, signal, time
import moeinf.cli.main
from moeinf.cli.entry import main

class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

def command(**_):
    Dropping()
    time.sleep(30)

moeinf.cli.main.command_line = lambda: command
main()
"""


def test_a_destructor_that_drops_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DROPPED, "list"],
        env=environment(tmp_path), capture_output=True, check=False, timeout=25,
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


MOMENTS = 6


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", [["verify", "demo"], ["pull", "demo"]], ids=lambda c: c[0])
def test_at_any_moment(command: list[str], demo_home: Path, tmp_path: Path) -> None:
    """From the start to the end: it ends at once, or the work was finished and is reported."""
    done = {"verify": "all as they were pulled", "pull": "success"}[command[0]]

    def start(home: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGINS, *command], env=environment(home), bufsize=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.read(1) == b"."
        return process

    def home_of(number: int) -> Path:
        return demo_home if command[0] == "verify" else tmp_path / str(number)

    begun = time.monotonic()
    assert done in b"".join(start(home_of(MOMENTS)).communicate()).decode()
    whole_s, codes = time.monotonic() - begun, []
    for number in range(MOMENTS):
        process = start(home_of(number))
        time.sleep(whole_s * (number + 0.5) / MOMENTS)  # later than Python's own start
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert b"Traceback" not in err
        assert process.returncode == 130 or (
            process.returncode == 0 and done in (out + err).decode()
        ), (number, process.returncode, err)
        if command[0] == "pull":  # `verify` writes nothing that the next one could meet
            assert command_in(home_of(number))(*command).code == 0
    assert codes.count(130) >= MOMENTS // 2


@pytest.mark.linux("reads /proc")
def test_who_ignores_interrupts_for_us_is_obeyed(tmp_path: Path) -> None:
    shell = subprocess.run(
        ["sh", "-c", 'trap "" INT; "$@" & wait $!', "sh", *COMMAND, "list"],
        env=environment(tmp_path),
        capture_output=True,
        check=True,
    )
    assert shell.stdout.startswith(b"NAME")
