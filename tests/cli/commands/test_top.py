"""Test `moeinf top` at an 80 x 24 terminal, without one, and as JSON."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.cli.conftest import check_document, command_in, environment
from tests.cli.screen import Screen
from tests.cli.warm import serving
from tests.cli.warm_terminal import spawn


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, demo_home: Path) -> Iterator[Path]:
    """Start a server that has answered, and yield its home."""
    home = tmp_path_factory.mktemp("top")
    (home / "models").symlink_to(demo_home / "models")
    with serving(["--memory", "30%", "--port", "0"], environment(home)) as (_, address, _):
        body = json.dumps({"model": "demo", "prompt": "17+25=", "stream": False}).encode()
        urllib.request.urlopen(f"http://{address}/api/generate", body, timeout=60).close()
        yield home


def test_one_frame(home: Path) -> None:
    run = command_in(home)
    frame = json.loads(run("top", "demo", "--json").out)
    check_document("top", frame)
    assert frame["hits"] > 0
    shown = run("top", "demo")
    lines = shown.out.splitlines()
    assert (shown.code, len(lines) <= 24, max(map(len, lines)) <= 80) == (0, True, True)
    assert "\x1b" not in shown.out
    layers = [line for line in lines if re.match(r"L\d", line)]
    assert len(layers) == frame["layers"]
    resident = sum(len(line[5:].replace("·", "").replace(" ", "")) for line in layers)
    assert abs(resident - frame["tiers"]["ram"]["experts"]) <= frame["in_flight"]
    assert lines[0].startswith("demo:bf16")


@pytest.mark.parametrize(("more", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_at_a_terminal(home: Path, more: dict[str, str], colours: bool) -> None:
    variables = {**environment(home), "TERM": "xterm"}
    del variables["NO_COLOR"], variables["COLUMNS"]
    child = spawn({**variables, **more}, "top", "demo", rows=24, columns=80)
    frames = []
    for _ in range(2):
        child.expect_exact("\x1b[H")
        child.expect_exact("\x1b[J")
        frames.append(child.before)
    child.send("q")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert child.before.endswith("\x1b[?25h\x1b[?1049l")
    for frame in frames:
        assert frame.count("\n") < 24
        assert not Screen(80).feed(frame).continued
        assert ("\x1b[32m" in frame) == colours
        assert "q leaves" in frame


def test_a_dumb_terminal_gets_one_frame(home: Path) -> None:
    child = spawn({**environment(home), "TERM": "dumb"}, "top", "demo", rows=24, columns=80)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "\x1b" not in child.before
    assert "q leaves" not in child.before


def test_without_a_server(tmp_path: Path, demo_home: Path) -> None:
    (tmp_path / "models").symlink_to(demo_home / "models")
    found = command_in(tmp_path)("top", "demo")
    assert (found.code, "no server runs demo:bf16" in found.err) == (1, True)
    assert "moeinf serve" in found.err
