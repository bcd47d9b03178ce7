"""Test `moeinf stop` with a server: it unloads one model and keeps the others."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.library.processes import Registry
from tests.cli.conftest import COMMAND, Command, check_document, command_in, environment

KEY = "a-secret-key"


@pytest.fixture
def home(tmp_path: Path, demo_home: Path) -> Path:
    (tmp_path / "models").symlink_to(demo_home / "models")
    return tmp_path


@pytest.fixture
def server(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server process that needs a key; yield the process and its address."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--memory", "30%", "--port", "0"],
        env={**environment(home), "MOEINF_API_KEY": KEY},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr:
        found = re.search(r"http://(\S+)", process.stderr.readline())
        assert found is not None
        yield process, found[1]
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.fixture
def own(home: Path) -> Command:
    command = command_in(home)
    return lambda *words, **more: command(*words, **{"MOEINF_API_KEY": KEY, **more})


def ask(address: str, model: str) -> str:
    body = {"model": model, "prompt": "17+25=", "stream": False}
    request = urllib.request.Request(
        f"http://{address}/api/generate",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as said:
        answer: dict[str, Any] = json.load(said)
    return str(answer["response"])


def test_stop_unloads_one_of_two_models(
    server: tuple[subprocess.Popen[str], str], own: Command, home: Path
) -> None:
    process, address = server
    assert ask(address, "demo:bf16") == ask(address, "demo:f32") == "42"
    wrong = own("stop", "demo:bf16", MOEINF_API_KEY="another")
    assert (wrong.code, "API key" in wrong.err) == (1, True)
    models = {engine.model for engine in Registry(home / "run").engines()}
    assert models == {"demo:bf16", "demo:f32"}

    stopped = json.loads(own("stop", "demo:bf16", "--json").out)
    check_document("stop", stopped)
    assert stopped == {"model": "demo:bf16", "stopped": [], "unloaded": [address]}
    assert [engine.model for engine in Registry(home / "run").engines()] == ["demo:f32"]
    assert process.poll() is None
    assert ask(address, "demo:f32") == "42"
    again = own("stop", "demo:bf16")
    assert (again.code, "nothing runs demo:bf16" in again.err) == (1, True)
    # The server of this home is proved: `run` sends it the key.
    used = own("run", "demo:f32", "17+25=", MOEINF_HOST=address)
    assert (used.out, used.err) == ("42\n", f"using the server at http://{address}\n")

    ended = json.loads(own("stop", "--all", "--json").out)
    check_document("stop", ended)
    assert ended == {"model": None, "stopped": [process.pid], "unloaded": []}
    assert process.wait(20) in (0, -signal.SIGTERM)
    assert Registry(home / "run").servers() == []


def test_stop_wants_a_model_or_all(own: Command) -> None:
    assert [own("stop").code, own("stop", "demo", "--all").code] == [2, 2]
    nothing = own("stop", "--all")
    assert (nothing.code, "nothing runs" in nothing.err) == (1, True)
