"""Test that an invalid value is wrong usage: exit code 2, and a message that names the value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeinf.cli.main import answer
from moeinf.runtime.config import EngineConfig, parse_duration, read_server_environment
from moeinf.runtime.invalid import InvalidValue
from moeinf.runtime.requests import SamplingOptions
from moeinf.runtime.sizes import parse_memory, parse_size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list"], "MOEINF_MEMORY: 'x'"),
        (["run", "demo", "x", "--temperature", "nan"], "temperature must be"),
        (["run", "demo", "x", "--seed", "9" * 30], "got 999"),
        (["run", "demo", "x", "--format", "{"], "format: "),
        (["run", "demo", "x", "--format", "FILE"], "format: "),
        (["run", "demo", "x", "--threads", "65"], "--threads"),
        (["eval", "demo", "--file", "FILE"], "--file: "),
        (["pull", "demo", "--bits", "nan"], "--bits"),
        (["pull", "demo", "--bits", "3.555"], "--bits"),
        (["pull", "demo", "--bits", "1e9"], "--bits"),
        (["pull", "demo:q8", "--bits", "3.5"], "--bits"),
        (["eamc", "show", "demo", "--plot", "x.txt"], "'x.txt' does not end in .png"),
        (["simulate", "x.eam", "--plot", "x.txt"], "'x.txt' does not end in .png"),
    ],
    ids=lambda value: "-".join(value[:4]) if isinstance(value, list) else None,
)
def test_wrong_usage(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "FILE").write_bytes(b"\xff\xfe{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setenv("MOEINF_HOST", "127.0.0.1:1")
    if arguments == ["list"]:
        monkeypatch.setenv("MOEINF_MEMORY", "x")
    assert answer([*arguments, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["code"] in ("usage", "invalid", "bad_format")
    assert words in told["message"]


def test_values_raise_one_class() -> None:
    for read in (
        lambda: parse_size("x"),
        lambda: parse_memory("101%"),
        lambda: parse_duration("a while"),
        lambda: read_server_environment({"MOEINF_HOST": "x:y"}),
        lambda: read_server_environment({"MOEINF_NUM_PARALLEL": "17"}),
        lambda: read_server_environment({"MOEINF_MAX_QUEUE": "0"}),
        lambda: SamplingOptions(top_p=2.0),
        lambda: SamplingOptions().having("top_k", "many"),
        lambda: EngineConfig(context=0),
        lambda: EngineConfig(threads=0),
    ):
        with pytest.raises(InvalidValue):
            read()
