"""Ctrl-C at any moment: exit code 130, no traceback. While a model answers: test_run, test_repl."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, environment

# Says on stderr which module is imported, so that a signal can be sent in the middle of imports.
SLOWLY = [COMMAND[0], "-X", "importtime", *COMMAND[1:]]


@pytest.mark.parametrize("module", ["importlib.metadata", "rich.console", "moeinf.cli.output"])
def test_while_it_is_imported(module: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*SLOWLY, "list"], env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen = line.decode().rpartition("|")[2].strip()
        if seen == module:
            break
    assert seen == module, "the module is not imported any more"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize("delay_s", [0.3, 0.6, 1.0, 1.5])
def test_while_a_model_loads(delay_s: float, demo_home: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "demo", "17+25=", "--memory", "30%"],
        env=environment(demo_home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
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
