"""Test that a new home, and every file with a user's text, is its owner's alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.cli.warm import run

MODELFILE = """FROM demo
SYSTEM a secret of mine
MESSAGE user another secret
MESSAGE assistant 42
"""


def others_may(path: Path) -> int:
    """Return the rights of others than the owner."""
    return stat.S_IMODE(path.lstat().st_mode) & 0o077


@pytest.mark.parametrize(
    "words",
    [
        ["pull", "demo", "--quiet"],
        ["ps"],
        ["prune"],
        ["plan", "demo"],
        ["run", "demo", "17+25=", "--no-server"],
        ["devices", "--quick"],
    ],
)
def test_a_new_home_is_its_owners(words: list[str], tmp_path: Path) -> None:
    home = tmp_path / "missing/home"
    run(words, {**environment(home), "MOEINF_NO_SERVER": "1"})
    assert not home.exists() or not others_may(home)
    if words[0] in ("pull", "run"):
        assert others_may(home / "models") == 0o055, "an administrator may share models"


def test_a_home_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert run(["pull", "demo", "--quiet"], environment(tmp_path)).returncode == 0
    assert others_may(tmp_path) == 0o055


def test_files_with_a_users_text(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file, own = tmp_path / "Modelfile", environment(tmp_path)
    file.write_text(MODELFILE)
    for _ in range(2):  # the second one replaces the first
        made = run(["create", "mine", "-f", str(file)], own)
        assert made.returncode == 0, made.stderr
    assert run(["cp", "mine", "copy"], own).returncode == 0
    assert run(["run", "mine", "17+25=", "--no-server"], own).returncode == 0
    file.unlink()
    told = [
        path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()
    ]
    assert len(told) == 2, "the manifests of mine and copy"
    state = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert state
    for path in [*told, *state, *(tmp_path / "state").iterdir()]:
        assert not others_may(path), path
