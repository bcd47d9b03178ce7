"""Test `ps`, `stop`, `cp` and `rm` with a real engine in another process."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.sizes import format_bytes
from tests.cli.conftest import COMMAND, Command, check_document, command_in, environment
from tests.cli.warm_terminal import spawn

BABBLE = ["--temperature", "50", "--top-k", "0", "--top-p", "1", "--seed", "1", "--memory", "30%"]


@pytest.fixture
def own(tmp_path: Path, demo_home: Path) -> Command:
    shutil.copytree(demo_home / "models", tmp_path / "models")
    return command_in(tmp_path)


@pytest.fixture
def conversation(own: Command, tmp_path: Path) -> Iterator[pexpect.spawn[str]]:
    """Start an engine that waits at its prompt; `own` runs other commands in its home."""
    variables = {**environment(tmp_path), "TERM": "dumb"}
    child = spawn(variables, "run", "demo", "--memory", "30%")
    child.expect_exact(">>> ")
    yield child
    child.close(force=True)


def test_ps_and_stop(conversation: pexpect.spawn[str], own: Command, tmp_path: Path) -> None:
    conversation.send("17+25=\r")
    conversation.expect_exact("42")
    running = json.loads(own("ps", "--json").out)
    check_document("ps", running)
    (engine,) = running["engines"]
    assert (engine["pid"], engine["name"], engine["tag"]) == (conversation.pid, "demo", "bf16")
    deadline = time.monotonic() + 10
    while engine["hit_rate"] is None and time.monotonic() < deadline:
        (engine,) = json.loads(own("ps", "--json").out)["engines"]
    assert 0 < engine["hit_rate"] < 1
    assert 0 < engine["experts"]["host"] <= 57
    assert engine["experts"]["disk"] == 192
    assert engine["bytes"]["host"] == engine["experts"]["host"] * 49152
    heading, row = own("ps").out.splitlines()
    assert heading.split() == ["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"]
    assert max(len(heading), len(row)) <= 90
    (model,) = [m for m in json.loads(own("list", "--json").out)["models"] if m["tag"] == "bf16"]
    assert engine["expires_at"] is None
    assert row.endswith("its process ends")
    assert (engine["digest"], engine["context"]) == (model["digest"], 512)
    assert row.split()[:2] == ["demo:bf16", model["digest"][:12]]
    assert engine["size_bytes"] == model["size_bytes"] < engine["peak_bytes"]
    assert format_bytes(model["size_bytes"]) in row
    _, verbose = own("ps", "--verbose").out.splitlines()
    assert verbose.startswith(row)
    more = verbose.removeprefix(row).split()
    assert more[0] == str(conversation.pid)
    assert f"0/{engine['experts']['host']}/192" in more

    stopped = own("stop", "demo")
    assert stopped.out == f"stopped demo:bf16 (process {conversation.pid})\n"
    conversation.expect(pexpect.EOF)
    assert "Traceback" not in str(conversation.before)
    conversation.close()
    assert conversation.exitstatus == 130
    assert json.loads(own("ps", "--json").out) == {"engines": [], "servers": []}
    assert [p.name for p in Settings(tmp_path).run.glob("*.figures")] == []
    again = own("stop", "demo")
    assert (again.code, again.out) == (1, "")
    assert "demo:bf16 is not running" in again.err


def test_stop_ends_an_answer(own: Command, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "demo", "hi", *BABBLE],
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGTERM)  # as `stop` does
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_stop_as_json(conversation: pexpect.spawn[str], own: Command) -> None:
    stopped = json.loads(own("stop", "demo", "--json").out)
    check_document("stop", stopped)
    assert stopped == {"model": "demo:bf16", "stopped": [conversation.pid], "unloaded": []}


def test_cp_makes_a_second_name(own: Command, tmp_path: Path) -> None:
    own("run", "demo", "17+25=")
    assert own("cp", "demo", "mine").out == "copied 'demo' to 'mine:bf16'\n"
    shard = "bf16/experts/L000/E000.safetensors"
    models = tmp_path / "models"
    assert (models / "demo" / shard).samefile(models / "mine" / shard)
    assert (tmp_path / "state/mine/bf16/last_used").exists()
    names = [m["name"] for m in json.loads(own("list", "--json").out)["models"]]
    assert sorted(names) == ["demo", "demo", "mine"]
    ids = {line.split()[0]: line.split()[1] for line in own("list").out.splitlines()}
    assert ids["mine:bf16"] == ids["demo:bf16"] != ids["demo:f32"]  # the same files
    assert own("rm", "demo:bf16", "--quiet").out == ""
    assert own("run", "mine:bf16", "17+25=").out == "42\n"
    assert own("rm", "mine:bf16").code == 0
    assert not (tmp_path / "state/mine").exists()


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("demo", 1, "`moeinf rm demo:bf16` removes it"),
        ("mine:f32", 2, "demo:bf16 is bf16"),
        ("../x", 2, "is not a model name"),
    ],
)
def test_cp_refuses(target: str, code: int, words: str, own: Command, tmp_path: Path) -> None:
    refused = own("cp", "demo:bf16", target)
    assert refused.code == code
    assert words in refused.err
    assert own("run", "demo", "17+25=").out == "42\n"
    assert list((tmp_path / "models").rglob(".*")) == []


def test_cp_beside_what_others_left(own: Command, tmp_path: Path) -> None:
    left = tmp_path / "models/mine/.bf16.partial"
    left.mkdir(parents=True)
    (left / "journal.jsonl").write_text("{}\n")  # from a pull, whose downloads are kept
    refused = own("cp", "demo", "mine")
    assert (refused.code, "`moeinf prune` removes it" in refused.err) == (1, True)
    (left / "journal.jsonl").rename(left / "manifest.json")  # from a copy that was killed
    assert own("cp", "demo", "mine").code == 0
    assert own("run", "mine:bf16", "17+25=").out == "42\n"
    assert not left.exists()
