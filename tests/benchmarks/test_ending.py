"""A command ends in time and leaves no files, for every cause of its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.ending import Ended, Stages, ending, folder_that_goes

_ROOT = Path(__file__).parents[2]
_COMMAND = """
import ctypes, sys, time
from pathlib import Path
from benchmarks import ending

ending._GRACE_S = 0.3
limit_s, what = float(sys.argv[2]), sys.argv[3]
with ending.ending(limit_s), ending.folder_that_goes(Path(sys.argv[1]), "made-") as folder:
    (folder / "below").mkdir()
    (folder / "below" / "weights").write_bytes(bytes(1 << 20))
    print("made", flush=True)
    if what == "hang":
        lock = ctypes.create_string_buffer(256)  # a mutex; who has it waits for it
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)
    time.sleep(60)
"""


def started(folder: Path, limit_s: float, what: str = "wait") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _COMMAND, str(folder), str(limit_s), what]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, cwd=_ROOT, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    assert len(list(folder.rglob("weights"))) == 1
    return process


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SIGTERM", "Ended: ended by SIGTERM"),
        ("SIGHUP", "Ended: the terminal was closed"),
        ("SIGINT", "KeyboardInterrupt"),
        ("SIGKILL", ""),
    ],
)
def test_signals(name: str, words: str, tmp_path: Path) -> None:
    if (number := getattr(signal, name, None)) is None:
        pytest.skip(f"this system has no {name}")
    with started(tmp_path, 60.0) as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode != 0
    assert words in said
    until_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("what", "words"),
    [("wait", "Ended: no time left after 1 s"), ("hang", "a call does not return")],
)
def test_the_end_of_its_time(what: str, words: str, tmp_path: Path) -> None:
    with started(tmp_path, 1.0, what) as process:
        _, said = process.communicate(timeout=30)
        assert process.returncode == 1
    assert words in said
    until_nothing_is_left(tmp_path)


def until_nothing_is_left(folder: Path) -> None:
    """Wait until the folder is empty.

    Another process deletes it; a killed command did not wait for that process.
    """
    end = time.monotonic() + 30
    while list(folder.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_nothing_disturbs_the_cleaning_up_and_all_is_as_before() -> None:
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        try:
            time.sleep(30)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            cleaned.append(True)

    with pytest.raises(Ended, match=r"no time left after 0.05 s"), ending(0.05):
        work()
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_that_is_done_in_time_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[threading.Timer] = []

    class Noted(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Noted)
    with ending(60), folder_that_goes(tmp_path, "made-") as folder:
        assert [timer.finished.is_set() for timer in timers] == [False, False]
        (folder / "weights").write_bytes(b"w")
    assert [timer.finished.is_set() for timer in timers] == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_stages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.5, 2.0, 2.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stages = Stages()
    for name in ("one", "two", "one"):
        stages.begin(name)
    stages.end()
    monkeypatch.undo()
    assert stages.seconds == {"starting": 1.0, "one": 0.8, "two": 0.5}
    assert capsys.readouterr().err == "one …\ntwo …\none …\n"
