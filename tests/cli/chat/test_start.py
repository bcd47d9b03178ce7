"""Test the first lines of a conversation: one line, a placeholder, the rest on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

pytest.importorskip("termios", reason="needs pseudo-terminals, which Windows lacks")

from tests.cli.chat.test_repl import Terminal
from tests.cli.conftest import environment
from tests.cli.screen import Screen
from tests.cli.warm_terminal import spawn

TRY = "Try: 17+25=   sort dog, cat, cow   spell ollama"  # of the demo only
Start = Callable[..., tuple[list[str], pexpect.spawn]]


@pytest.fixture
def start(tmp_path: Path, demo_home: Path) -> Iterator[Start]:
    """Return a function that starts a conversation, and gives the lines before its prompt."""
    (tmp_path / "models").symlink_to(demo_home / "models")
    children = []

    def begin(*arguments: str) -> tuple[list[str], pexpect.spawn]:
        variables = {**environment(tmp_path), "TERM": "xterm"}
        child = spawn(variables, "run", "demo", *arguments, columns=120)
        children.append(child)
        child.expect_exact(">>>")
        lines = Screen(120).feed(str(child.before)).lines  # the spinner has left no trace
        return lines[:-1], child

    yield begin
    for child in children:
        child.close(force=True)


def test_one_line_and_a_placeholder(start: Start) -> None:
    lines, child = start()
    assert lines == ["demo:bf16 · CPU · all experts in RAM · context 512", TRY]
    child.expect_exact("Send a message (/? for help)")


def test_a_part_of_the_experts(start: Start) -> None:
    lines, _ = start("--memory", "30%", "--ctx", "128")
    assert lines == ["demo:bf16 · CPU · 57 of 192 experts in RAM · context 128", TRY]


def test_verbose_has_every_choice(start: Start) -> None:
    lines, _ = start("--verbose")
    assert lines[-2:] == ["demo:bf16 · CPU · all experts in RAM · context 512", TRY]
    for begin in ("device: cpu", "context 512 tokens", "memory for experts", "disk: ", "kernels: "):
        assert any(line.startswith(begin) for line in lines), begin
    assert not any("libcuda" in line for line in lines)


def test_show_has_what_the_start_omits(demo_home: Path) -> None:
    terminal = Terminal(demo_home)
    told = terminal.ask("/show info")
    assert "chosen:  device: cpu" in told
    assert "chosen:  kernels: " in told
    assert terminal.leave() == 0
