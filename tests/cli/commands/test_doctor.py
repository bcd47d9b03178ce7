"""Test what `moeinf doctor` and `moeinf --version --verbose` print."""

from __future__ import annotations

import io
import json
import os
import platform
import sys
from typing import Any

import pytest

from moeinf.cli.commands.doctor import doctor
from moeinf.native import kernel_path
from moeinf.runtime.machine.diagnosis import Finding
from tests.cli.conftest import Command

TERM = "xterm-256color"
NONE = {"MOEINF_LIBCUDA": "libcuda-of-no-machine.so"}


def test_each_lack_has_its_line(moeinf: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    lack = Finding("huge_pages", False, "never", "echo madvise")
    fine = Finding("torch", True, "2.11.0+cpu")
    monkeypatch.setattr("moeinf.cli.commands.doctor.diagnose", lambda _: [fine, lack])
    done = moeinf("doctor")
    assert (done.code, done.err) == (0, "")
    rows = done.out.splitlines()
    assert [row.split() for row in rows[2:4]] == [
        ["torch", "ok", "2.11.0+cpu"],
        ["huge", "pages", "missing", "never"],
    ]
    after = rows[rows.index("To type:") + 1 :]
    assert [" ".join(row.split()) for row in after] == ["huge pages: echo madvise"]


def test_json_agrees_with_this_process(moeinf: Command) -> None:
    done = moeinf("doctor", "--json", **NONE)
    document: dict[str, Any] = json.loads(done.out)
    assert document["surroundings"]["kernels"].startswith(kernel_path())
    facts = {one["name"]: one for one in document["findings"]}
    assert facts["terminal"]["fact"].startswith("none")
    assert facts["gpu"]["ok"]
    assert len(facts) == len(document["findings"])


def finding(document: str, name: str) -> tuple[bool, str, str | None]:
    (one,) = [one for one in json.loads(document)["findings"] if one["name"] == name]
    return one["ok"], one["fact"], one["hint"]


@pytest.mark.parametrize(
    ("encoding", "ok", "fact", "hint"),
    [
        ("utf-8", True, "utf-8", None),
        ("ascii", False, "ascii: other characters are shown as ?", "export LC_ALL=C.UTF-8"),
        ("cp1252", False, "cp1252: other characters are shown as ?", "export LC_ALL=C.UTF-8"),
    ],
)
def test_the_encoding_of_the_output(
    encoding: str, ok: bool, fact: str, hint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeinf.cli.commands.doctor.diagnose", lambda _: [])
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    doctor(json=True, quiet=False)
    sys.stdout.flush()
    assert finding(written.getvalue().decode(encoding), "locale") == (ok, fact, hint)


@pytest.mark.linux("opens a terminal")
@pytest.mark.parametrize(
    ("term", "width", "ok", "fact", "hint"),
    [
        (TERM, 60, True, "60 columns, 256 colours", None),
        (TERM, 59, False, "59 columns, 256 colours", None),
        (
            "dumb",
            80,
            False,
            "a dumb one: no colours, bars or spinner",
            "export TERM=xterm-256color",
        ),
    ],
)
def test_a_terminal(
    term: str, width: int, ok: bool, fact: str, hint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import termios

    monkeypatch.setattr("moeinf.cli.commands.doctor.diagnose", lambda _: [])
    monkeypatch.setenv("TERM", term)
    for name in ("COLORTERM", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    outer, inner = os.openpty()
    termios.tcsetwinsize(inner, (24, width))
    with os.fdopen(outer, "rb", 0) as screen, os.fdopen(inner, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        doctor(json=True, quiet=False)
        stream.flush()
        assert finding(screen.read(1 << 16).decode(), "terminal") == (ok, fact, hint)


def test_version_alone_is_one_line(moeinf: Command) -> None:
    short, verbose = moeinf("--version"), moeinf("--version", "--verbose")
    assert short.out.startswith("moeinf version is ")
    assert short.out.count("\n") == 1
    assert verbose.out.startswith(short.out)
    assert f" {platform.python_version()}" in verbose.out
    assert "kernels:" in verbose.out
