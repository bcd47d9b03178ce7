"""Test a bug in moeinf: two lines on stderr, the traceback in a file."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from moeinf.cli.commands.models import list_models
from moeinf.cli.main import answer
from moeinf.runtime import crash_log


class Panic(BaseException):
    """A BaseException that is not an Exception, like pyo3's."""


class Broken:
    error: BaseException = KeyError("a bug")

    def __init__(self, _settings: object) -> None:
        raise self.error


@pytest.fixture(autouse=True)
def a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setattr(list_models, "Library", Broken)


def test_the_traceback_goes_to_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["list"]) == 1
    log = tmp_path / "logs/moeinf.log"
    said = capsys.readouterr()
    assert said.out == ""
    assert "this is a bug in moeinf: KeyError" in said.err
    assert str(log) in said.err
    assert "Traceback" not in said.err
    assert "KeyError: 'a bug'" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    answer(["list"])
    assert log.read_text().count("Traceback") == 2


@pytest.mark.parametrize(
    "error",
    [
        ValueError("attempt to get argmax of an empty sequence"),
        Panic("called `Option::unwrap()` on a `None` value"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        RecursionError("maximum recursion depth exceeded"),
        AssertionError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_unexpected_exception_is_a_bug(
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Broken, "error", error)
    assert answer(["list", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["code"] == "internal"
    assert type(error).__name__ in told["message"]
    assert type(error).__name__ in (tmp_path / "logs/moeinf.log").read_text()


def test_no_control_characters_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "error", RuntimeError("a\x1b[2Jb\x9b\u202e"))
    assert answer(["list"]) == 1
    text = (tmp_path / "logs/moeinf.log").read_text()
    assert "a\\x1b[2Jb\\x9b\\u202e" in text
    assert "\x1b" not in text


def test_the_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_log, "_MOST_BYTES", 100)
    for _ in range(3):
        answer(["list"])
    kept = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert kept == ["moeinf.log", "moeinf.log.1"]
    assert (tmp_path / "logs/moeinf.log").read_text().count("Traceback") == 1


def test_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("no folder")
    assert answer(["list"]) == 1
    assert "Try: MOEINF_DEBUG=1, which shows where it happened\n" in capsys.readouterr().err
