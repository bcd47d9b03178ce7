"""Test what a terminal shows before an answer: a spinner, and how much of the prompt is read.

The work that is waited for ends once the terminal has shown the spinner.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from moeinf.cli.chat.local import Opener
from moeinf.cli.chat.repl import Repl
from moeinf.cli.main import answer
from moeinf.cli.output import Output
from moeinf.cli.spinner import FRAME_S
from moeinf.runtime.config import Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.requests import Limits, SamplingOptions
from tests.cli.conftest import environment
from tests.cli.screen import Pty, Screen, open_pty


@pytest.fixture
def pty(demo_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pty]:
    for name, value in {**environment(demo_home), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    with open_pty(100) as pty:
        yield pty


def use(pty: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal the output of this process; pytest sets the streams before each test."""
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "stdout", pty.stream)
    monkeypatch.setattr(sys, "stderr", pty.stream)


def test_one_answer(pty: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    use(pty, monkeypatch)
    begin, extend_all = Opener.open, Engine.extend_all

    def slow_open(self: Opener, *given: Any) -> Any:
        pty.wait_for("loading demo:bf16")
        return begin(self, *given)

    def slow_extend_all(self: Engine, texts: Any) -> Any:
        state, ids = texts[0]
        if len(ids) > 1:
            pty.wait_for(f"reading the prompt {state.length}/363 tokens")
        return extend_all(self, texts)

    monkeypatch.setattr(Opener, "open", slow_open)
    monkeypatch.setattr(Engine, "extend_all", slow_extend_all)
    line = ["run", "demo", "17+25=" * 60, "--max-tokens", "4", "--temperature", "0"]
    assert answer(line) == 0
    lines = Screen(100).feed(pty.rest()).lines
    # how many calls read it depends on the experts and the KV that are there
    assert re.search(r"reading the prompt \d+/363 tokens", pty.received)
    assert len(lines) == 2, lines  # the answer, and the empty line of the cursor
    assert re.fullmatch("[^⠋]{1,40}", lines[0])


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_nothing_with(option: str, pty: Pty, monkeypatch: pytest.MonkeyPatch) -> None:
    use(pty, monkeypatch)
    begin = Opener.open

    def slow_open(self: Opener, *given: Any) -> Any:
        time.sleep(3 * FRAME_S)
        return begin(self, *given)

    monkeypatch.setattr(Opener, "open", slow_open)
    assert answer(["run", "demo", "17+25=", option]) == 0
    assert "42" in pty.rest()
    assert "loading" not in pty.received
    assert "\x1b" not in pty.received


def test_a_conversation_that_hides_thinking(
    pty: Pty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(pty, monkeypatch)
    partner: Any = SimpleNamespace(model="demo:bf16", dropped=0, finish_reason="stop", ready=True)
    partner.notes = list

    def say(*_: object) -> Iterator[tuple[str, str]]:
        pty.wait_for("waiting for demo:bf16")
        partner.reading(256, 1300)
        pty.wait_for("reading the prompt 256/1,300 tokens")
        partner.dropped = 2
        yield "thinking", "hm"
        yield "answer", "42"

    partner.say = say
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("hello\r/bye\r")
        given = (partner, SamplingOptions(), Limits(), Settings(tmp_path), Output())
        Repl(*given, verbose=False, shows_thinking=False).loop()
    lines = Screen(100).feed(pty.rest()).lines
    assert lines == ["the context is full: the oldest 2 messages were dropped", "42", "", ""]
