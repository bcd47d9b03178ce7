"""Test pipelines of real processes on this machine: answers, keys, and a stage that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from moeinf.cli.main import answer
from tests.cli.conftest import Command, command_in, environment
from tests.cli.warm import Warm, Written, run, serving

KEY = "a key of these tests"
SUM = ["run", "demo", "17+25=", "--no-trace"]


@pytest.fixture
def variables(demo_home: Path) -> dict[str, str]:
    return {**environment(demo_home), "MOEINF_STAGE_KEY": KEY, "MOEINF_NO_SERVER": "1"}


@contextmanager
def stage(
    layers: str, variables: dict[str, str], *more: str, port: str = "0", model: str = "demo"
) -> Iterator[tuple[Warm, str, IO[str]]]:
    """Run `moeinf stage`; yield it, its address, and the rest of its standard error."""
    reading, writing = os.pipe()
    words = ["stage", model, "--experimental", "--layers", layers, "--listen"]
    with os.fdopen(reading, encoding="utf-8") as said:
        with os.fdopen(writing, "wb") as stderr:
            process = Warm([*words, f"127.0.0.1:{port}", *more], variables, stderr=stderr)
        try:
            line = said.readline()
            found = re.search(r"at (127\.0\.0\.1:\d+) \(Ctrl-C ends it\)", line)
            assert found is not None, line
            yield process, found[1], said
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, 130, -signal.SIGTERM, -signal.SIGKILL)


def test_three_processes_answer(variables: dict[str, str]) -> None:
    few = ("--memory", "50%")
    with (
        stage("2-3", variables, *few) as (_, second, _),
        stage("4-5", variables, *few) as (_, third, said),
    ):
        line = [*SUM, *few, "--experimental-pipeline", f"{third},{second}", "--json"]
        for _ in range(2):  # a stage serves one first stage after the other
            done = run(line, variables)
            assert (done.returncode, json.loads(done.stdout)["text"]) == (0, "42"), done.stderr
        assert said.readline() == "connected with 127.0.0.1\n"
        notes = json.loads(done.stdout)["notes"]
        assert any("layers 0-1 here, 2-3 at" in note for note in notes)
        wrong = run(line, {**variables, "MOEINF_STAGE_KEY": "another of the tests"})
        assert wrong.returncode == 1
        assert json.loads(wrong.stdout)["error"]["code"] == "stage_lost"
        gap = run([*SUM, "--experimental-pipeline", third, "--json"], variables)
        assert json.loads(gap.stdout)["text"] == "42", "four layers are here"
        gap = run([*SUM, "--experimental-pipeline", second, "--json"], variables)
        assert gap.returncode == 1
        assert json.loads(gap.stdout)["error"]["code"] == "stages_differ"


def test_a_stage_is_killed_while_it_is_awaited(variables: dict[str, str]) -> None:
    with stage("3-5", variables) as (process, address, said):
        line = [*SUM, "--experimental-pipeline", address, "--json"]
        first = Written(line, variables)
        assert said.readline() == "connected with 127.0.0.1\n"
        process.send_signal(signal.SIGSTOP)  # the first one loads its layers, and waits for these
        with pytest.raises(TimeoutError):
            first.wait(3)
        process.send_signal(signal.SIGKILL)
        out, err = first.communicate(20)
        assert first.wait(20) == 1, err
        assert json.loads(out)["error"]["code"] == "stage_lost"
    port = address.rpartition(":")[2]
    with stage("3-5", variables, port=port), ExitStack() as silent:
        for _ in range(20):  # they delay no other
            silent.enter_context(socket.create_connection(("127.0.0.1", int(port))))
        done = run(line, variables)
        assert (done.returncode, json.loads(done.stdout)["text"]) == (0, "42"), done.stderr


def told(said: IO[str], words: str) -> None:
    """Read what a stage says until a line begins with these words."""
    while not (line := said.readline()).startswith(words):
        assert line, words


def test_ctrl_c_while_a_stage_is_awaited(variables: dict[str, str]) -> None:
    """The first one waits for the stage, the second one for nothing. The stage serves on."""
    with stage("3-5", variables) as (process, address, said):
        line = [*SUM, "--experimental-pipeline", address, "--json"]
        for presses in (1, 2):
            first = Written(line, variables)
            told(said, "connected with")
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                first.wait(3)
            for _ in range(presses):
                first.send_signal(signal.SIGINT)
                time.sleep(0.5)
            if presses == 2:
                assert first.wait(10) == 130
            process.send_signal(signal.SIGCONT)
            _, err = first.communicate(20)
            assert first.wait() == 130, err
            told(said, "no longer connected with")
        done = run(line, variables)
        assert (done.returncode, json.loads(done.stdout)["text"]) == (0, "42")


def asked(address: str, prompt: str) -> Any:
    body = {"model": "demo", "stream": False, "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"http://{address}/api/chat",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["code"]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_server_goes_on_with_a_new_stage(name: str, variables: dict[str, str]) -> None:
    number = signal.Signals[name]  # Windows has no SIGKILL, and its imitation collects this file
    own = {**variables, "MOEINF_HOST": "127.0.0.1:0", "MOEINF_NUM_PARALLEL": "2"}
    prompts = {"17+25=": "42", "reverse planet": "tenalp"}
    with (
        stage("3-5", own) as (process, where, _),
        serving(["--experimental-pipeline", where], own) as (_, address, _),
    ):
        for prompt, wanted in [*prompts.items()] * 2:
            assert asked(address, prompt) == wanted
        process.send_signal(number)
        assert process.wait(20) == (130 if number == signal.SIGINT else -number)
        assert asked(address, "17+25=") == (503, "stage_lost")
        with stage("3-5", own, port=where.rpartition(":")[2]):
            for prompt, wanted in prompts.items():
                assert asked(address, prompt) == wanted


@pytest.fixture
def moeinf(demo_home: Path) -> Command:
    return command_in(demo_home)


def test_wrong_usage(moeinf: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ["--listen", "127.0.0.1:0"]
    wrong = {
        "add --experimental": ["--layers", "3-5", *here],
        "expected FIRST-LAST": ["--experimental", "--layers", "5-3", *here],
        "has the layers 0-5, not 3-6": ["--experimental", "--layers", "3-6", *here],
        "expected HOST:PORT": ["--experimental", "--layers", "3-5", "--listen", "7000"],
        "MOEINF_STAGE_KEY": ["--experimental", "--layers", "3-5", "--listen", "0.0.0.0:0"],
    }
    for words, line in wrong.items():
        done = moeinf("stage", "demo", *line)
        assert done.code in (1, 2)
        assert words in done.err
    done = moeinf(*SUM, "--experimental-pipeline", "192.0.2.1:7000")
    assert done.code == 2
    assert "MOEINF_STAGE_KEY" in done.err
    assert answer(["serve", "--cluster", "local", "--experimental-pipeline", "[::1]:1"]) == 2
    assert moeinf(*SUM, "--dry-run", "--experimental-pipeline", "[::1]:1").code == 2
