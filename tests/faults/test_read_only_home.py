"""A home on a read-only file system: models run, and a note names what is not stored."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Result, environment

pytestmark = pytest.mark.linux("mounts in a namespace of its own")
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def run(home: Path, *arguments: str) -> Result:
    """Run in a new mount namespace with a read-only home, also for root."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", READ_ONLY, str(home), *COMMAND, *arguments],
        env=environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def home(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    trial = subprocess.run(
        ["unshare", "--mount", "sh", "-c", READ_ONLY, str(tmp_path_factory.mktemp("x")), "true"],
        capture_output=True,
        check=False,
    )
    if trial.returncode:
        pytest.skip("mounting is not permitted here")
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(demo_home / "models/demo/bf16", home / "models/demo/bf16")
    return home


def test_a_model_runs(home: Path) -> None:
    done = run(home, "run", "demo", "17+25=", "--memory", "30%", "--json")
    assert (done.code, json.loads(done.out)["text"]) == (0, "42"), done.err
    (note,) = json.loads(done.out)["notes"]
    assert note == f"{home} cannot be written: nothing is remembered"
    plain = run(home, "run", "demo", "17+25=")
    assert (plain.code, plain.out) == (0, "42\n")
    assert "cannot be written: nothing is remembered" in plain.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ps"], 0),
        (["eamc", "show", "demo"], 0),
        (["stop", "--all"], 1),
        (["rm", "demo"], 1),
        (["pull", "demo:f32"], 1),
        (["trace", "demo", "--dataset", "demo", "--limit", "1"], 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_end_in_words(arguments: list[str], code: int, home: Path) -> None:
    done = run(home, *arguments)
    assert done.code == code, done.err
    assert "bug in moeinf" not in done.err
    assert "[Errno" not in done.err
