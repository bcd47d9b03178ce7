"""Test completion as shells request it: by the variable that the installed script sets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, command_in, environment

Complete = Callable[[Path, str], set[str]]


def ask(home: Path, shell: str, variables: dict[str, str]) -> str:
    done = command_in(home)(_MOEINF_COMPLETE=f"complete_{shell}", **variables)
    assert (done.code, done.err) == (0, "")
    return done.out


def bash(home: Path, line: str) -> set[str]:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return set(ask(home, "bash", words).split())


def zsh(home: Path, line: str) -> set[str]:
    shown = ask(home, "zsh", {"_TYPER_COMPLETE_ARGS": line})
    return set(shown.replace('"', " ").replace("\\", "").split())


def fish(home: Path, line: str) -> set[str]:
    words = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return set(ask(home, "fish", words).split())


@pytest.mark.parametrize("complete", [bash, zsh, fish])
def test_names_that_can_be_pulled(complete: Complete, tmp_path: Path) -> None:
    for command in ("pull", "run", "plan", "show"):
        assert "olmoe" in complete(tmp_path, f"moeinf {command} olm")
    assert {"mixtral", "mixtral-8x22b"} <= complete(tmp_path, "moeinf pull mix")
    assert "mixtral" not in complete(tmp_path, "moeinf pull olm")
    assert "olmoe" not in complete(tmp_path, "moeinf stop olm")  # not installed


@pytest.mark.parametrize("complete", [bash, zsh, fish])
def test_names_that_are_here(complete: Complete, demo_home: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_home / "models/demo", tmp_path / "models/mine")
    for command in ("run", "stop", "rm", "cp", "verify"):
        assert "mine" in complete(tmp_path, f"moeinf {command} mi")
    assert {"mine:bf16", "mine:f32"} <= complete(tmp_path, "moeinf rm mine:")


@pytest.mark.parametrize("complete", [bash, zsh, fish])
def test_commands(complete: Complete, tmp_path: Path) -> None:
    assert {"pull", "prune", "ps", "plan"} & complete(tmp_path, "moeinf p") >= {"pull", "plan"}


def test_a_home_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("no folder")
    assert "olmoe" in bash(tmp_path, "moeinf run olm")
    assert bash(tmp_path, "moeinf rm x") == set()


def test_it_imports_no_torch(tmp_path: Path) -> None:
    variables = {"COMP_WORDS": "moeinf run olm", "COMP_CWORD": "2", "PYTHONPROFILEIMPORTTIME": "1"}
    asked = {**os.environ, **environment(tmp_path), **variables}
    done = subprocess.run(
        COMMAND,
        env={**asked, "_MOEINF_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "olmoe" in done.stdout
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "moeinf.runtime.hub.aliases" in modules
    assert not {"torch", "transformers", "tokenizers"} & modules
