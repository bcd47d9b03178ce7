"""Test what `moeinf doctor` and `moeinf --version --verbose` print."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest

from moeinf.native import kernel_path
from moeinf.runtime.machine.diagnosis import Finding
from tests.cli.conftest import Command

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


def test_version_alone_is_one_line(moeinf: Command) -> None:
    short, verbose = moeinf("--version"), moeinf("--version", "--verbose")
    assert short.out.startswith("moeinf version is ")
    assert short.out.count("\n") == 1
    assert verbose.out.startswith(short.out)
    assert f" {platform.python_version()}" in verbose.out
    assert "kernels:" in verbose.out
