"""Test the server that `moeinf run` starts in the background, and when it starts none."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from moeinf.runtime.library.processes import Registry
from tests.cli import warm
from tests.cli.conftest import COMMAND, Command, check_document, command_in, environment
from tests.cli.warm_terminal import spawn

HEAVY = "torch numpy transformers tokenizers fastapi uvicorn huggingface_hub".split()
# The command line, which then names the heavy modules that it has imported.
LIGHT = f"""
import sys
from moeinf.cli.main import answer
code = answer(sys.argv[1:])
print([name for name in {HEAVY} if name in sys.modules])
sys.exit(code)
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path, demo_home: Path) -> Iterator[Path]:
    (tmp_path / "models").symlink_to(demo_home / "models")
    yield tmp_path
    Registry(tmp_path / "run").stop()


@pytest.fixture
def variables(home: Path, port: int) -> dict[str, str]:
    """Return variables with which `run` may start a server."""
    own = {"MOEINF_HOST": f"127.0.0.1:{port}", "MOEINF_NO_SERVER": "", "MOEINF_API_KEY": "a-key"}
    return {**environment(home), **own}


@pytest.fixture
def moeinf(home: Path, variables: dict[str, str]) -> Command:
    command = command_in(home)
    return lambda *words, **more: command(*words, **{**variables, **more})


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_first_run_starts_it_and_the_next_uses_it(
    home: Path, port: int, variables: dict[str, str], moeinf: Command
) -> None:
    line = f'{shlex.join(COMMAND)} run demo "17+25=" | cat'
    first = subprocess.run(  # returns at the end of both pipes: the server has neither
        ["sh", "-c", line],
        env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (first.returncode, first.stdout) == (0, "42\n")
    address = f"127.0.0.1:{port}"
    words = f"starting the server at http://{address}, which ends by itself when idle\n"
    assert first.stderr == words
    (server,) = Registry(home / "run").servers()
    assert server.address == address
    assert os.getsid(server.pid) == server.pid

    second = subprocess.run(
        [sys.executable, "-c", LIGHT, "run", "demo", "reverse planet", "--json"],
        env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    document, _, imported = second.stdout.rpartition("}\n")
    assert json.loads(document + "}")["text"] == "tenalp"
    assert imported == "[]\n"
    assert second.stderr == f"using the server at http://{address}\n"

    running = json.loads(moeinf("ps", "--json").out)
    check_document("ps", running)
    assert running["servers"] == [{"pid": server.pid, "address": address}]
    assert [engine["pid"] for engine in running["engines"]] == [server.pid]
    assert f"process {server.pid} is the server at http://{address}" in moeinf("ps").err
    recorded = json.loads(moeinf("eamc", "show", "demo", "--json").out)
    assert recorded["entries"] == 2  # the server records the routing, as `run` does
    assert stat.S_IMODE((home / "logs/server.log").stat().st_mode) == 0o600

    ended = json.loads(moeinf("stop", "--all", "--json").out)
    assert ended["stopped"] == [server.pid]
    assert Registry(home / "run").servers() == []


def test_two_runs_start_one(home: Path, variables: dict[str, str], tmp_path: Path) -> None:
    files = [(tmp_path / f"out{i}").open("w+") for i in range(2)]
    runs = [warm.Warm(["run", "demo", "17+25="], variables, stdout=file) for file in files]
    assert [run.wait(120) for run in runs] == [0, 0]
    for file in files:
        file.seek(0)
        assert file.read() == "42\n"
        file.close()
    assert len(Registry(home / "run").servers()) == 1
    assert (home / "logs/server.log").read_text().count("listening on") == 1


def test_a_conversation_outlives_it(home: Path, variables: dict[str, str], moeinf: Command) -> None:
    child = spawn({**variables, "TERM": "dumb"}, "run", "demo", "--keepalive", "10m")
    child.expect_exact("the server at ")  # one line, in place of a note that it starts
    child.expect_exact(">>> ")
    wait_for(Registry(home / "run").engines)  # it is loaded while the user types

    def minutes_left() -> float:
        (engine,) = json.loads(moeinf("ps", "--json").out)["engines"]
        return 0.0 if engine["expires_at"] is None else _seconds_until(engine["expires_at"]) / 60

    wait_for(lambda: 9 < minutes_left() < 10.1)
    for again in (False, True):
        child.send("17+25=\r")
        if again:
            child.expect_exact("starting the server at ")
        child.expect_exact("42")
        child.expect_exact(">>> ")
        assert moeinf("stop", "--all").code == 0
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def _seconds_until(moment: str) -> float:
    until = datetime.datetime.fromisoformat(moment)
    return (until - datetime.datetime.now(datetime.UTC)).total_seconds()


def test_it_ends_when_it_is_idle(home: Path, port: int, variables: dict[str, str]) -> None:
    server = subprocess.Popen([*COMMAND, "serve", "--background", "1.5", "--quiet"], env=variables)
    try:
        wait_for(Registry(home / "run").servers)
        body = json.dumps({"model": "demo", "keep_alive": -1}).encode()
        key = {"Authorization": f"Bearer {variables['MOEINF_API_KEY']}"}
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}/api/generate", body, key), timeout=120
        ).close()
        time.sleep(3)  # longer than it stays without a model
        assert server.poll() is None
        end = warm.run(["run", "demo", "17+25=", "--keepalive", "0"], variables)
        assert (end.stdout, end.returncode) == ("42\n", 0)
        assert server.wait(30) == 0
        assert Registry(home / "run").servers() == []
        assert Registry(home / "run").engines() == []
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGKILL)
        server.wait()


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (["--no-server"], {}),
        (["--memory", "30%"], {}),
        ([], {"MOEINF_NO_SERVER": "1"}),
        ([], {"MOEINF_HOST": "0.0.0.0:PORT"}),
        ([], {"MOEINF_HOST": "127.0.0.1:0"}),
    ],
)
def test_none_is_started(
    arguments: list[str], more: dict[str, str], home: Path, port: int, moeinf: Command
) -> None:
    more = {name: value.replace("PORT", str(port)) for name, value in more.items()}
    done = moeinf("run", "demo", "17+25=", *arguments, **more)
    assert (done.code, done.out) == (0, "42\n")
    assert "starting" not in done.err
    assert Registry(home / "run").servers() == []
    assert not (home / "logs").exists()


def test_it_ends_as_it_starts(home: Path, port: int, moeinf: Command) -> None:
    with socket.socket() as taken:  # nothing listens there, and nothing else can
        taken.bind(("127.0.0.1", port))
        done = moeinf("run", "demo", "17+25=")
    assert (done.code, done.out) == (0, "42\n")
    starting, why = done.err.splitlines()
    assert starting.startswith("starting the server at ")
    cause = f"cannot listen on 127.0.0.1:{port}: address already in use"
    assert why.startswith(f"the server ended with exit code 1 as it started: {cause}; Try: ")
    assert why.endswith(": the model runs in this process")


def test_a_home_that_cannot_hold_its_log(home: Path, moeinf: Command) -> None:
    (home / "logs").write_text("a file")
    done = moeinf("run", "demo", "17+25=")
    assert (done.code, done.out) == (0, "42\n")
    why = f"no server could be started ({home}/logs: file exists): the model runs in this process"
    assert done.err.splitlines()[1:] == [why]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--keepalive", "soon"], "'soon' is invalid (expected 30s, 5m, 1h30m or seconds)"),
        (["--keepalive", "0", "--ctx", "64"], "--ctx and --keepalive cannot be combined"),
        (["--keepalive", "5m", "--no-server"], "--no-server and --keepalive cannot be combined"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, moeinf: Command) -> None:
    refused = moeinf("run", "demo", "x", *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert words in refused.err
