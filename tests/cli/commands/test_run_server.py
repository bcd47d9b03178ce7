"""Test `moeinf run` through a real server process, and its fallbacks without a server."""

from __future__ import annotations

import datetime
import http.server
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Command, check_document, command_in, environment
from tests.cli.warm import serving
from tests.cli.warm_terminal import spawn
from tests.server.scripted import CHATML, pull_talker

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


@pytest.fixture(scope="module")
def served(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Yield a home, and the MOEINF_HOST of a server process that uses it."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(demo_home / "models")
    with serving_process(home) as host:
        yield home, host


@contextmanager
def serving_process(home: Path) -> Iterator[str]:
    with serving(["--memory", "100%", "--port", "0"], environment(home)) as (_, host, _):
        yield host


@pytest.fixture
def run(served: tuple[Path, str]) -> Command:
    home, host = served
    command = command_in(home)
    return lambda *words, **more: command("run", *words, **{"MOEINF_HOST": host, **more})


def test_one_answer(run: Command, served: tuple[Path, str]) -> None:
    done = run("demo", "17+25=", "--verbose")
    assert (done.code, done.out) == (0, "42\n")
    lines = done.err.splitlines()
    assert lines[0] == f"using the server at http://{served[1]}"
    labels = [line.partition(":")[0] for line in lines[1:]]
    assert labels[:3] == ["total duration", "load duration", "prompt eval count"]
    assert "expert hit rate" in labels
    assert re.search(r"eval rate: +[\d.]+ tokens/s", done.err)
    assert run("demo", "17+25=", "--quiet").err == ""
    own = run("demo", "17+25=", "--memory", "50%", "--verbose")
    assert own.out == "42\n"
    assert "--memory needs an engine of its own: the model runs in this process" in own.err


def test_the_same_answers_as_alone(run: Command) -> None:
    here = {"MOEINF_HOST": "127.0.0.1:1"}
    for words in (
        ("demo:f32", "sort owl, fig, zebra, ant"),
        ("demo", "17+25=", "--raw", "--max-tokens", "8", "--temperature", "0"),
        ("demo", "hi", "--seed", "3", "--temperature", "1.5", "--max-tokens", "20"),
        ("demo", "reverse planet", "--stop", "n", "--system", "Be kind."),
        ("demo", "json a=1 b=2", "--format", "json", "--max-tokens", "40"),
    ):
        assert run(*words).out == run(*words, **here).out


def test_what_cannot_be_asked(run: Command) -> None:
    for host in ({}, {"MOEINF_HOST": "127.0.0.1:1"}):
        done = run("demo", "17+25=", "--think", **host)
        assert (done.code, done.out) == (2, "")
        assert "demo:bf16 does not support thinking" in done.err
    raw = run("demo", "--raw")
    assert (raw.code, raw.out) == (2, "")
    assert "--raw needs a prompt" in raw.err


def test_documents_and_errors(run: Command) -> None:
    done = run("demo", "17+25=", "--json", stdin="")
    document = json.loads(done.out)
    check_document("run", document)
    assert (document["text"], document["finish_reason"], document["tokens"]) == ("42", "stop", 3)
    assert document["server"].startswith("http://127.0.0.1:")
    assert done.err.startswith("using the server")
    long = run("demo", "x" * 4000)
    assert long.code == 1
    assert "the context" in long.err
    unknown = run("no-such-model", "x")
    assert unknown.code == 1
    assert "no-such-model" in unknown.err


def test_a_server_that_cannot_be_used(run: Command, served: tuple[Path, str]) -> None:
    none = run("demo", "17+25=", "--verbose", MOEINF_HOST="127.0.0.1:1")
    assert none.out == "42\n"
    assert none.err.startswith("no server at http://127.0.0.1:1: the model runs in this process")
    assert run("demo", "17+25=", MOEINF_HOST="127.0.0.1:1").err == ""
    for hello, status, line in (
        ("moeinf is running", 200, "is moeinf 0.0.1, this is "),
        ("Ollama is running", 200, "no moeinf server at"),
        ("The listener wants to be asked otherwise.", 401, "no moeinf server at"),
    ):
        with _listening(hello, status) as host:
            done = run("demo", "17+25=", "--verbose", MOEINF_HOST=host)
            assert done.out == "42\n"
            assert line in done.err.splitlines()[0]


def test_a_port_that_is_taken(run: Command, tmp_path: Path) -> None:
    with _listening("hello", 200) as host:
        done = command_in(tmp_path)("serve", "--port", host.rpartition(":")[2])
    assert done.code == 1
    assert f"cannot listen on {host}: address already in use" in done.err
    assert "--port" in done.err


def test_ps_says_how_long_a_server_keeps_a_model(run: Command, served: tuple[Path, str]) -> None:
    run("demo", "17+25=")
    command = command_in(served[0])
    deadline = time.monotonic() + 20  # figures are written once a second
    while "minutes from now" not in command("ps").out and time.monotonic() < deadline:
        time.sleep(0.2)
    assert re.search(r"[345] minutes from now", command("ps").out)
    document = json.loads(command("ps", "--json").out)
    check_document("ps", document)
    (until,) = [e["expires_at"] for e in document["engines"] if e["tag"] == "bf16"]
    left = datetime.datetime.fromisoformat(until) - datetime.datetime.now(datetime.UTC)
    assert 200 < left.total_seconds() <= 301


@contextmanager
def _listening(hello: str, status: int) -> Iterator[str]:
    """Yield the address of a server that is not moeinf's."""

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            said = b'{"version": "0.0.1"}' if self.path == "/api/version" else hello.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def terminal(served: tuple[Path, str]) -> Iterator[Callable[[str], str]]:
    home, host = served
    child = spawn({**environment(home), "MOEINF_HOST": host, "TERM": "dumb"}, "run", "demo")
    child.expect_exact(">>> ")
    assert "demo:bf16 · the server at " in str(child.before)

    def ask(line: str) -> str:
        child.send(line + "\r")
        child.expect_exact(">>> ")
        return _CONTROL.sub("", str(child.before))

    ask.child = child  # type: ignore[attr-defined]
    yield ask
    child.close(force=True)


def test_a_conversation(terminal: Callable[[str], str], served: tuple[Path, str]) -> None:
    assert "42" in terminal("17+25=")
    assert "6 MoE layers, 32 experts each, 4 per token" in terminal("/show info")
    assert re.search(r"experts in RAM: +\d+ of 192", terminal("/show cache"))
    assert "<|assistant|>" in terminal("/show template")
    terminal("/set verbose")
    assert "prompt eval count" in terminal("17+25=")
    terminal("/set quiet")
    assert "Set 'format' mode." in terminal("/set format json")
    terminal("/set parameter num_predict 40")
    assert "{" in terminal("json a=1 b=2")
    terminal("/set noformat")
    for _ in range(12):  # enough for a context of 512 tokens
        said = terminal("sort " + "owl, fig, zebra, ant, " * 3)
        if "messages were dropped" in said:
            break
    else:
        pytest.fail("the context never overflows")
    terminal("/save kept")
    kept = json.loads((served[0] / "conversations/kept.json").read_text())
    assert kept["model"] == "demo:bf16"


def test_ctrl_c_ends_the_answer_there_too(
    terminal: Callable[[str], str], served: tuple[Path, str]
) -> None:
    for parameter in ("temperature 80", "top_k 0", "top_p 1", "seed 1"):
        terminal(f"/set parameter {parameter}")
    before = _decoded(served[1])
    child = terminal.child  # type: ignore[attr-defined]
    child.send("hi\r")
    for pattern in ("hi", r"\n", r"[^\s\x1b]"):  # the echo, and the answer's first character
        child.expect(pattern)
    child.sendintr()
    child.expect_exact(">>> ")
    time.sleep(0.5)
    decoded = _decoded(served[1])
    assert 1 <= decoded - before < 480  # without Ctrl-C, the answer fills the context
    time.sleep(0.5)
    assert _decoded(served[1]) == decoded
    terminal("/set parameter temperature 0")
    terminal("/clear")
    assert "42" in terminal("17+25=")


def _decoded(host: str) -> int:
    """Return the number of tokens that the server has decoded for demo:bf16."""
    with urllib.request.urlopen(f"http://{host}/metrics") as said:
        text = said.read().decode()
    found = re.search(r"generation_tokens_total\{[^}]*bf16[^}]*\} (\S+)", text)
    return 0 if found is None else int(float(found[1]))  # 0: not loaded yet


def test_a_model_that_thinks(tmp_path: Path) -> None:
    """The server separates the reasoning, and this process keeps it out of stdout."""
    home = pull_talker(tmp_path, CHATML)
    with serving_process(home) as host:
        run = command_in(home)
        done = run("run", "demo", "17+25=", "--think", "--max-tokens", "20", MOEINF_HOST=host)
        assert done.code == 0
        plain = run("run", "demo", "17+25=", "--think", "--max-tokens", "20")
        assert done.out == plain.out
