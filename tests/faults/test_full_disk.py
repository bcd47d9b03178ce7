"""A full disk: a whole model runs, and a note tells that nothing is remembered."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory

from moeinf.cli.chat.repl import KeptHistory
from moeinf.cli.main import answer
from tests.cli.conftest import COMMAND, Result, environment
from tests.faults.test_system_errors import Failing

FULL = """
set -e
mount -t tmpfs -o size=64m none "$0"
cp -a "$1" "$0/models"
case "$2" in
  used) mkdir -p "$0/run" && : > "$0/run/.lock" ;;
  inodes) mount -o "remount,nr_inodes=$(($(find "$0" | wc -l) + 1))" "$0" ;;
esac
[ "$2" = inodes ] || dd if=/dev/zero of="$0/fill" bs=64k 2> /dev/null || true
shift 2
exec "$@"
"""


def run(home: Path, models: Path, state: str, *arguments: str) -> Result:
    """Run in a new mount namespace, with a home on a file system without space."""
    own = {**environment(home), "MOEINF_NO_SERVER": "1"}
    line = [*COMMAND, *arguments]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", FULL, str(home), str(models), state, *line],
        env=own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def models(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    trial = [
        "unshare",
        "--mount",
        "mount",
        "-t",
        "tmpfs",
        "none",
        str(tmp_path_factory.mktemp("x")),
    ]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(demo_home / "models/demo/bf16", models / "demo/bf16")
    return models


@pytest.mark.linux("mounts in a namespace of its own")
@pytest.mark.parametrize(
    "state",
    ["fresh", *(pytest.param(name, marks=pytest.mark.full) for name in ("used", "inodes"))],
)
def test_a_model_runs(state: str, models: Path, tmp_path: Path) -> None:
    done = run(tmp_path, models, state, "run", "demo", "17+25=", "--memory", "30%", "--json")
    assert (done.code, done.out != "") == (0, True), done.err
    document = json.loads(done.out)
    assert document["text"] == "42"
    assert f"{tmp_path} cannot be written: nothing is remembered" in document["notes"]


@pytest.mark.linux("mounts in a namespace of its own")
@pytest.mark.parametrize("words", [["list"], ["ps"], ["show", "demo"], ["rm", "demo"]])
def test_other_commands(words: list[str], models: Path, tmp_path: Path) -> None:
    done = run(tmp_path, models, "used", *words)
    assert done.code == 0, done.err


@pytest.mark.linux("opens an engine")
@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES"])
def test_a_model_runs_after_any_failure_of_its_state(
    name: str,
    demo_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Opening, then writing files of the state fails; those of the model are read."""
    home, number = tmp_path / "home", getattr(errno, name)
    shutil.copytree(demo_home / "models/demo/bf16", home / "models/demo/bf16")
    monkeypatch.setenv("MOEINF_HOME", str(home))
    monkeypatch.setenv("MOEINF_HOST", "127.0.0.1:1")
    write = os.write

    def failing_write(descriptor: int, data: bytes) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(home):
            raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    for first in (1, 2, 4):
        failing = [Failing(home / folder, number, first) for folder in ("run", "state", "prefixes")]
        with monkeypatch.context() as patch:
            for one in failing:
                patch.setattr(os, "open", one.wrap(os.open))
                patch.setattr(os, "mkdir", one.wrap(os.mkdir))
            patch.setattr(os, "write", failing_write)
            code = answer(["run", "demo", "17+25=", "--no-server"])
        said = capfd.readouterr()
        assert (code, said.out) == (0, "42\n"), f"{first}: {said.err}"
        assert "cannot be written" in said.err


def test_a_history_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is in the conversation; only the file lacks it."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileHistory, "store_string", full)
    told = list[str]()
    history = KeptHistory(tmp_path / "history", told.append)
    for line in ("one", "two"):
        history.append_string(line)
    assert history.get_strings() == ["one", "two"]
    assert told == [f"{tmp_path / 'history'}: the disk is full: what you type is not kept"]
