"""Test that control characters of outside text never reach a terminal.

The text comes from a model, a server, a saved conversation, and the history of typed lines.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.version import version
from moeinf.runtime.visible import visible
from tests.cli.chat import test_thinking
from tests.cli.conftest import environment
from tests.cli.screen import open_pty
from tests.cli.warm import Warm
from tests.cli.warm_terminal import spawn
from tests.conftest import pull

# Title, bell, erased screen, C1 sequences, reversed text, backspaces, another character set.
HOSTILE = "\x1b]0;pwned\x07 \x1b[2J \x9b31m \x9d0;pwned\x9c \x90q\x9c \u202egpj\u202c \x08\x08 \x0e"
RAW = ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\x9c", "\x9d", "\x90", "\u202e", "\x08 ", "\x0e")
SHOWN = visible("\x1b]0;pwned\x07")


def check(seen: str, least: int) -> None:
    """Check that the text is shown so many times, and that no part of it is raw."""
    assert [raw for raw in RAW if raw in seen] == []
    assert seen.count(SHOWN) >= least, seen


def started(home: Path, *arguments: str, **variables: str) -> pexpect.spawn[str]:
    return spawn({**environment(home), "TERM": "xterm", **variables}, *arguments, columns=400)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home whose model thinks and answers with control sequences."""
    place = tmp_path_factory.mktemp("hostile")
    swapped = {"let me see": f"see {HOSTILE}", "it is ": f"is {HOSTILE}"}
    with pytest.MonkeyPatch.context() as patch:
        words = tuple(swapped.get(word, word) for word in test_thinking._WORDS)
        chains = tuple(
            tuple(swapped.get(word, word) for word in chain) for chain in test_thinking._CHAINS
        )
        patch.setattr(test_thinking, "_WORDS", words)
        patch.setattr(test_thinking, "_CHAINS", chains)
        test_thinking.make_thinker(place / "checkpoint")
    pull(place / "checkpoint", Settings(place / "home"), "thinker:bf16")
    return place / "home"


@pytest.mark.parametrize(
    ("arguments", "variables"), [([], {}), (["--nowordwrap"], {"TTY_COMPATIBLE": "0"})], ids=str
)
def test_a_model(arguments: list[str], variables: dict[str, str], thinker: Path) -> None:
    """It stays a terminal where rich is told that it is not one."""
    line = ["run", "thinker:bf16", "6*7", "--temperature", "0", *arguments]
    with open_pty(400) as pty:
        given = {**environment(thinker), "TERM": "xterm", **variables}
        code = Warm(line, given, None, pty.stream, pty.stream, pty.stream).wait()
        seen = pty.rest()
    assert code == 0
    check(seen, least=2)  # its thoughts, its answer
    assert "42" in seen


class Hostile(http.server.BaseHTTPRequestHandler):
    """A server that answers as moeinf does, with control sequences wherever a text is free."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(b"moeinf is running")
        else:
            self._send(json.dumps({"version": version()}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/show":
            self._show(asked["model"])
            return
        if "refuse" in str(asked):
            self._send(json.dumps({"error": HOSTILE, "code": HOSTILE}).encode(), 500)
            return
        said = {"thinking": HOSTILE, "content": HOSTILE, "tool_calls": [{"name": HOSTILE}]}
        lines: list[dict[str, Any]] = [
            {"model": HOSTILE, "message": said},
            {"message": {}, "done": True, "done_reason": HOSTILE, "eval_count": HOSTILE},
        ]
        self._send("".join(json.dumps(line) + "\n" for line in lines).encode())

    def _show(self, model: str) -> None:
        facts = {"general.architecture": HOSTILE, "x.block_count": HOSTILE, "x.license": HOSTILE}
        about = {"model": "demo:bf16", "capabilities": ["completion"], "template": HOSTILE}
        if model == "other":
            about["model"] = HOSTILE
        self._send(json.dumps({**about, "model_info": facts}).encode())

    def _send(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def hostile_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_a_saved_conversation_and_the_history(tmp_path: Path) -> None:
    saved = {"model": HOSTILE, "system": HOSTILE, "messages": []}
    (tmp_path / "conversations").mkdir()
    (tmp_path / "conversations/bad.json").write_text(json.dumps(saved))
    (tmp_path / "history").write_text(f"\n# 2026\n+{HOSTILE}\n")
    with hostile_server() as host:
        child = started(tmp_path, "run", "demo", MOEINF_HOST=host)
        try:
            child.expect_exact("help)")
            for line, least in (
                ("hello", 2),  # thinking and content
                ("/set verbose", 0),
                ("again", 2),
                ("refuse", 1),
                ("/show info", 1),
                ("/show template", 1),
                ("/load other", 0),  # the server's name of it is refused
                ("/list chats", 1),
                ("/load bad", 1),  # the model's name
                ("/show system", 1),
                ("/delete bad", 0),
            ):
                child.send(f"{line}\r")
                child.expect_exact("help)")
                check(str(child.before), least)
            child.send("\x1b[A" * 12)  # to the oldest typed line
            child.expect(re.escape("^[") + ".{0,9}]0;pwned.{0,9}" + re.escape("^G"))
            assert not re.search("\x1b]|\x07|[\x80-\x9f]", str(child.before) + str(child.after))
        finally:
            child.close(force=True)


def test_names_on_the_command_line(tmp_path: Path) -> None:
    child = started(tmp_path, "show", HOSTILE.replace("\x00", ""))
    child.expect(pexpect.EOF)
    check(str(child.before), least=1)
