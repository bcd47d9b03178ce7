"""Test `moeinf search`, and the names that people type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import DEMO_CHECKPOINT
from tests.cli.conftest import Command, command_in
from tests.conftest import pull


def test_a_table(moeinf: Command) -> None:
    result = moeinf("search", "mixtral")
    lines = result.out.splitlines()
    assert lines[0].split() == ["NAME", "PARAMETERS", "DISK", "DOWNLOAD", "LICENCE"]
    assert [line.split()[0] for line in lines[1:]] == ["mixtral", "mixtral-base", "mixtral-8x22b"]


def test_json_of_no_match_is_empty(moeinf: Command) -> None:
    assert json.loads(moeinf("search", "zzz", "--json").out) == {"models": []}


@pytest.mark.parametrize("command", [["run", "MODEL", "hi"], ["pull", "MODEL"]])
def test_a_dense_model_is_named_as_such(command: list[str], moeinf: Command) -> None:
    for model in ("llama3", "llama3:8b", "deepseek-r1:7b"):
        result = moeinf(*(model if word == "MODEL" else word for word in command))
        assert result.code == 2
        assert f"{model} is a dense model" in result.err
        assert result.err.count("`moeinf run ") == 2


def test_near_names(moeinf: Command) -> None:
    for command in (("pull", "mixtra"), ("run", "mixtra", "hi")):
        result = moeinf(*command)
        assert result.code in (1, 2)
        assert "Try: mixtral, " in result.err
        assert len(result.err) < 400


def test_other_spellings_of_a_model(moeinf: Command) -> None:
    assert moeinf("run", "demo:latest", "17+25=").out == "42\n"
    assert "gpt_oss" in moeinf("show", "gpt-oss:20b").out


def test_the_only_tag_is_used_and_named(tmp_path: Path) -> None:
    settings = Settings(tmp_path)
    pull(DEMO_CHECKPOINT, settings, "mine:q8")
    moeinf = command_in(tmp_path)
    for name in ("mine", "mine:latest"):
        result = moeinf("run", name, "17+25=")
        assert (result.out, result.code) == ("42\n", 0)
        assert "mine: only mine:q8 is on this machine" in result.err
    assert moeinf("run", "mine:q4", "17+25=").code == 1
    pull(DEMO_CHECKPOINT, settings, "mine:f32")
    several = moeinf("run", "mine", "17+25=")
    assert several.code == 1
    assert "mine:q8 and mine:f32" in several.err
