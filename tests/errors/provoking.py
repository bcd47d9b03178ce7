"""Run commands and requests that fail, and compare the shown errors with the expected words.

golden/words.txt holds the words. To accept new ones, run the tests with NEW_WORDS=1 and read the
difference.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from moeinf.cli.main import answer
from moeinf.cli.output import Output
from moeinf.runtime import system

GOLDEN = Path(__file__).with_name("golden") / "words.txt"


class Shown(NamedTuple):
    code: str
    message: str
    hint: str


@dataclass
class Place:
    """A home with the demo, an empty current folder, and the clean-up after the test."""

    home: Path
    folder: Path
    demo_home: Path
    patch: pytest.MonkeyPatch
    request: pytest.FixtureRequest
    later: ExitStack = field(default_factory=ExitStack)
    server: dict[str, Any] = field(default_factory=dict)  # settings of the test's server

    def own_demo(self) -> Path:
        """Replace the shared models by a copy of the demo; return its folder."""
        (self.home / "models").unlink()
        folder = self.home / "models/demo/bf16"
        shutil.copytree(self.demo_home / "models/demo/bf16", folder)
        return folder

    def raising(self, owner: Any, name: str, error: BaseException) -> None:
        """Plant an error: calls of owner.name raise it."""

        def fail(*_: object, **__: object) -> None:
            raise error

        self.patch.setattr(owner, name, fail)

    def plain(self, words: str) -> str:
        """Return the words with placeholders for the parts that differ between runs."""
        for path, name in ((self.folder, "FOLDER"), (self.home, "HOME")):
            words = words.replace(str(path), name)
        for pattern, name in (
            (r"(process|kill -9) \d+", r"\1 PID"),
            (r"127\.0\.0\.1:\d{4,}", "127.0.0.1:PORT"),
            (r"L\d{3}/E\d{3}", "LAYER/EXPERT"),
            (r"0x[0-9a-f]{8}", "0xCRC"),
            (r"\bcu[A-Z]\w+", "cuCall"),
        ):
            words = re.sub(pattern, name, words)
        return words


def without_locks(place: Place) -> list[str]:
    """Make the system one without locks of files."""
    place.patch.setattr(system, "fcntl", None)
    place.patch.setattr(system, "sys", SimpleNamespace(platform="win32"))
    return ["stop", "demo"]


def shown_by(place: Place, command: list[str] | Callable[[], int | None]) -> tuple[int, Shown]:
    """Run a command line in this process, or a part of it; return its exit code and error."""
    shown: list[Shown] = []
    place.patch.setattr(Output, "error", lambda _, *told: shown.append(Shown(*told)))
    code = command() if callable(command) else answer(command)
    (one,) = shown
    return code or 0, one


def check_words(title: str, words: list[str]) -> None:
    """Check the words of `title` against the golden file."""
    known = {
        part.split("\n", 1)[0]: part.split("\n", 1)[1].rstrip("\n").split("\n")
        for part in ("\n" + GOLDEN.read_text(encoding="utf-8")).split("\n# ")[1:]
    }
    if os.environ.get("NEW_WORDS"):
        known[title] = words
        parts = [f"# {name}\n" + "\n".join(known[name]) + "\n" for name in sorted(known)]
        GOLDEN.write_text("\n".join(parts), encoding="utf-8")
    assert words == known.get(title)
