"""Test that `/api/simulate` replays a model's own recording as `moeinf simulate` does."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from moeinf.cli.main import answer
from moeinf.runtime.jobs import memory_curve
from moeinf.runtime.limited_process import LimitedProcess
from tests.server.conftest import serving
from tests.server.test_http import connected

SHARES = "5%,10%,20%,35%,50%,75%"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, demo_home: Path) -> Path:
    """Return a home whose demo has a recording."""
    home = tmp_path_factory.mktemp("traced")
    (home / "models").symlink_to(demo_home / "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEINF_HOME", str(home))
        assert answer(["trace", "demo", "--dataset", "demo", "--limit", "6", "--quiet"]) == 0
    return home


def asked(address: str) -> httpx.Response:
    return httpx.get(f"{address}/api/simulate", params={"model": "demo"}, timeout=60)


def test_it_is_that_of_the_command(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[object] = []
    began = LimitedProcess.start
    monkeypatch.setattr(LimitedProcess, "start", lambda *a: (starts.append(a[1]), began(*a)))
    with serving(traced) as address:
        found = asked(address).json()
        assert asked(address).json() == found  # from the first replays
        assert len(starts) == 1
        path = traced / "state/demo/bf16/recording.eam"
        os.utime(path, ns=(path.stat().st_mtime_ns + 1,) * 2)
        assert asked(address).json()["trace"] == found["trace"]
        assert len(starts) == 2  # another recording
    how = ["--policies", "learned,lru,belady", "--capacity", SHARES]
    assert answer(["simulate", str(path), *how, "--json"]) == 0
    (want,) = json.loads(capsys.readouterr().out)["traces"]
    assert found["trace"] == want
    assert (found["model"], found["policy"]) == ("demo:bf16", "learned")
    assert found["experts_bytes"] == 6 * 32 * 49152
    rates = {(one["policy"], one["capacity"]): one["hit_rate"] for one in want["results"]}
    assert rates["lru", 0.05] < rates["learned", 0.05] <= rates["belady", 0.05]
    assert rates["learned", 0.75] > 0.9


def test_it_ends_with_its_client(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replays never end; the process is closed when the client has gone."""
    begun, closed = threading.Event(), threading.Event()

    class Endless:
        def __init__(self, _: str) -> None: ...

        def start(self, *_: Any) -> None:
            begun.set()

        def done(self, seconds: float) -> bool:
            return threading.Event().wait(seconds)

        def close(self) -> None:
            closed.set()

    monkeypatch.setattr(memory_curve, "LimitedProcess", Endless)
    with serving(traced) as address:
        with connected(address) as client:
            client.sendall(b"GET /api/simulate?model=demo HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert begun.wait(30)
        assert closed.wait(15)


def test_clearing_forgets_the_recording(
    traced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the last test of the file: the others need the recording."""
    monkeypatch.setenv("MOEINF_HOME", str(traced))
    assert answer(["eamc", "clear", "demo", "--quiet"]) == 0
    with serving(traced) as address:
        told = asked(address)
    assert (told.status_code, told.json()["code"]) == (404, "not_recorded")
    assert "`moeinf trace demo:bf16 --dataset demo`" in told.json()["error"]
