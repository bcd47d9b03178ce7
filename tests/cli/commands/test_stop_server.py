"""Test `moeinf stop` and `rm` with a server: one model goes, the server and the others stay."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from moeinf.runtime.library.processes import Registry
from tests.cli.conftest import Command, check_document, command_in, environment
from tests.cli.warm import Warm, serving

KEY = "a-secret-key"


@pytest.fixture
def home(tmp_path: Path, demo_home: Path) -> Path:
    (tmp_path / "models").symlink_to(demo_home / "models")
    return tmp_path


@pytest.fixture
def server(home: Path) -> Iterator[tuple[Warm, str]]:
    """Start a server process that needs a key; yield the process and its address."""
    variables = {**environment(home), "MOEINF_API_KEY": KEY}
    with serving(["--memory", "30%", "--port", "0"], variables) as (process, address, _):
        yield process, address


@pytest.fixture
def own(home: Path) -> Command:
    command = command_in(home)
    return lambda *words, **more: command(*words, **{"MOEINF_API_KEY": KEY, **more})


def test_verbose_prints_a_line_per_request(home: Path) -> None:
    """A path cannot add a line or steer the terminal."""
    line = ["--verbose", "--port", "0"]
    with serving(line, environment(home)) as (process, address, stderr):
        for path in ("api/version", "a%0Ab%1b%5B2J"):
            with suppress(HTTPError):
                urllib.request.urlopen(f"http://{address}/{path}", timeout=60).close()
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        lines = [line for line in stderr.read().splitlines() if line.startswith("GET")]
    shown = [re.sub(r"\d+ ms$", "N ms", line) for line in lines]
    assert shown == ["GET /api/version 200 N ms", r"GET /a\nb\x1b[2J 404 N ms"]


def begin(address: str, model: str, **more: Any) -> http.client.HTTPResponse:
    """Send a question; return once the answer begins."""
    body = {"model": model, "prompt": "17+25=", **more}
    request = urllib.request.Request(
        f"http://{address}/api/generate",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}"},
    )
    answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=60)
    return answer


def ask(address: str, model: str) -> str:
    with begin(address, model, stream=False) as said:
        return str(json.load(said)["response"])


def test_stop_unloads_one_of_two_models(server: tuple[Warm, str], own: Command, home: Path) -> None:
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
    assert (again.code, "demo:bf16 is not running" in again.err) == (1, True)
    # The server of this home is proved: `run` sends it the key.
    used = own("run", "demo:f32", "17+25=", MOEINF_HOST=address)
    assert (used.out, used.err) == ("42\n", f"using the server at http://{address}\n")

    ended = json.loads(own("stop", "--all", "--json").out)
    check_document("stop", ended)
    assert ended == {"model": None, "stopped": [process.pid], "unloaded": []}
    assert process.wait(20) in (0, -signal.SIGTERM)
    assert Registry(home / "run").servers() == []


def test_set_changes_the_memory_of_a_model(
    server: tuple[Warm, str], own: Command, home: Path
) -> None:
    process, address = server
    nothing = own("set", "demo", "--memory", "50%")
    assert (nothing.code, "no server runs demo:bf16" in nothing.err) == (1, True)
    assert ask(address, "demo:bf16") == "42"
    said = json.loads(own("set", "demo", "--memory", "60%", "--json").out)
    check_document("set", said)
    assert said["servers"][0]["slots"] * 10 // said["servers"][0]["experts"] in (5, 6)
    shown = own("set", "demo", "--memory", "auto")
    assert "GiB" not in shown.out + shown.err
    assert "for experts: " in shown.out + shown.err
    too_little = own("set", "demo", "--memory", "1%")
    assert (too_little.code, "is too little" in too_little.err) == (1, True)
    wrong = own("set", "demo", "--memory", "101%")
    assert (wrong.code, "'--memory': '101%'" in wrong.err) == (2, True)
    assert ask(address, "demo:bf16") == "42"
    assert process.poll() is None


def test_stop_wants_a_model_or_all(own: Command) -> None:
    assert [own("stop").code, own("stop", "demo", "--all").code] == [2, 2]
    nothing = own("stop", "--all")
    assert (nothing.code, "nothing runs" in nothing.err) == (1, True)


def test_rm_of_a_model_that_a_server_keeps(
    home: Path, demo_home: Path, server: tuple[Warm, str], own: Command
) -> None:
    process, address = server
    (home / "models").unlink()
    shutil.copytree(demo_home / "models", home / "models")
    assert ask(address, "demo:f32") == "42"
    babble = {"temperature": 80, "top_k": 0, "top_p": 1, "seed": 1}
    with begin(address, "demo:bf16", options=babble) as answer:
        answer.readline()
        busy = json.loads(own("rm", "demo:bf16", "--json").out)["error"]
        assert busy["code"] == "model_in_use"
        assert "demo:bf16 is answering a request" in busy["message"]
        wrong = own("rm", "demo:f32", MOEINF_API_KEY="another")
        assert (wrong.code, "API key" in wrong.err) == (1, True)
        both = own("rm", "demo:f32", "no-such-model")
        assert both.code == 1
        assert own("rm", "demo:f32").out == "deleted 'demo:f32'\n"  # idle, and beside an answer
        assert b'"done": true' in answer.read()
    assert not (home / "models/demo/f32").exists()
    assert process.poll() is None
    with begin(address, "demo:bf16", prompt="", keep_alive=0, stream=False) as unloaded:
        assert unloaded.status == 200
    assert own("rm", "demo:bf16").out == "deleted 'demo:bf16'\n"
    assert own("list", "--json").out.split() == ["{", '"models":', "[]", "}"]
