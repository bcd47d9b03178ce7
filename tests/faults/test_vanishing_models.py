"""Another process deletes a model at any moment of a command or a request: then it is absent."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.cli.main import answer
from tests.server.conftest import serving

CALLS = (
    (os, "open"), (io, "open"), (os, "stat"), (os, "lstat"), (os, "scandir"), (os, "listdir"),
    (os, "readlink"),
)  # fmt: skip
COMMANDS = [
    ["list", "--json"],
    ["show", "demo", "--json"],
    ["plan", "demo", "--json"],
    ["verify", "demo", "--json"],
    ["cp", "demo", "second", "--json"],
    ["run", "demo", "17+25=", "--json", "--no-server"],
    ["run", "demo", "17+25=", "--json", "--no-server", "--memory", "30%"],
]
REQUESTS: dict[str, Callable[[httpx.Client], httpx.Response]] = {
    "tags": lambda client: client.get("/api/tags"),
    "models": lambda client: client.get("/v1/models"),
    "model": lambda client: client.get("/v1/models/demo"),
    "show": lambda client: client.post("/api/show", json={"model": "demo"}),
    "plan": lambda client: client.get("/api/plan?model=demo"),
    "verify": lambda client: client.post("/api/verify", json={"model": "demo", "stream": False}),
    "copy": lambda client: client.post(
        "/api/copy", json={"source": "demo", "destination": "other"}
    ),
    "generate": lambda client: client.post(
        "/api/generate", json={"model": "demo", "prompt": "17+25=", "stream": False}
    ),
    "chat": lambda client: client.post(
        "/v1/chat/completions",
        json={"model": "demo", "messages": [{"role": "user", "content": "17+25="}]},
    ),
}


class Vanishing:
    """Moves a model's folder away at the `first` call that names something in it."""

    def __init__(self, folder: Path, first: int) -> None:
        self.folder, self.first, self.count = folder, first, 0
        self._lock = threading.RLock()  # looking whether the folder exists is such a call, too

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).startswith(str(self.folder)):
                with self._lock:
                    self.count += 1
                    if self.count == self.first and self.folder.exists():
                        self.folder.rename(self.folder.with_name(".bf16.old"))
            return call(path, *arguments, **options)

        return watched


@pytest.fixture
def home(demo_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(demo_home / "models/demo/bf16", tmp_path / "models/demo/bf16")
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    monkeypatch.setenv("MOEINF_HOST", "127.0.0.1:1")
    monkeypatch.setenv("MOEINF_NO_SERVER", "1")
    return tmp_path


def moments(home: Path, act: Callable[[], None], few: int) -> Iterator[Vanishing]:
    """Yield for each moment that is tried, within which the folder vanishes."""
    folder, first = home / "models/demo/bf16", 1
    while True:
        one = Vanishing(folder, first)
        with pytest.MonkeyPatch.context() as patch:
            for owner, call in CALLS:
                patch.setattr(owner, call, one.wrap(getattr(owner, call)))
            act()
        yield one
        if one.count < first:
            return
        old = folder.with_name(".bf16.old")
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(home / "models/second", ignore_errors=True)
        shutil.rmtree(home / "models/other", ignore_errors=True)
        first = first + 1 if first < few else int(first * 1.6)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_commands(
    words: list[str], every_point: bool, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = list[int]()
    absent = 0
    for one in moments(home, lambda: codes.append(answer(words)), 40 if every_point else 6):
        said = capfd.readouterr()
        told = f"{words} at {one.first}: {said.out} {said.err}"
        document = json.loads(said.out)
        if codes[-1]:
            assert document["error"]["code"] == "model_not_found", told
            absent += 1
        elif words[0] == "list":
            assert "problem" not in said.out, told
    assert absent or words[0] in ("list", "plan")  # `plan` of the demo needs no model
    assert codes[-1] == 0


@pytest.mark.full
@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name: str, every_point: bool, home: Path) -> None:
    answers = list[httpx.Response]()
    with serving(home, keep_alive_s=0.0) as address, httpx.Client(base_url=address) as client:
        client.timeout = 60

        def act() -> None:
            answers.append(REQUESTS[name](client))

        for one in moments(home, act, 40 if every_point else 6):
            last = answers[-1]
            told = f"{name} at {one.first}: {last.status_code} {last.text[:300]}"
            assert last.status_code in (200, 404), told
            if last.status_code == 404:
                assert "model_not_found" in last.text, told
            assert '"problem"' not in last.text, told
    assert answers[-1].status_code == 200
