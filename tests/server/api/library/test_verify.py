"""Test that a model is verified over HTTP as by `moeinf verify`, until its client leaves."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moeinf.cli.main import answer
from moeinf.runtime.library import verify as checks
from moeinf.server.api.library.background import ClientGone
from tests.server.conftest import serving

DENSE = "dense.safetensors"


@pytest.fixture
def own(tmp_path: Path, demo_home: Path) -> Iterator[tuple[str, Path]]:
    """Start a server on a copy of the demo; yield its address and the model's folder."""
    folder = tmp_path / "models/demo/bf16"
    shutil.copytree(demo_home / "models/demo/bf16", folder)
    with serving(tmp_path) as address:
        yield address, folder


def test_an_intact_model_and_a_damaged_one(
    own: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, folder = own
    monkeypatch.setenv("MOEINF_HOME", str(tmp_path))
    told = httpx.post(f"{address}/api/verify", json={"model": "demo"}, timeout=60)
    *steps, last = [json.loads(line) for line in told.text.splitlines()]
    assert {step["status"] for step in steps} == {"verifying"}
    assert [step["completed"] for step in steps] == sorted(step["completed"] for step in steps)
    assert steps[-1]["completed"] == steps[-1]["total"] > 0
    assert (last["status"], last["damaged"]) == ("success", [])
    data = bytearray((folder / DENSE).read_bytes())
    data[-1] ^= 1
    (folder / DENSE).write_bytes(data)
    (folder / "config.json").unlink()
    body = {"model": "demo:bf16", "stream": False}
    whole = httpx.post(f"{address}/api/verify", json=body, timeout=60).json()
    assert whole.pop("status") == "damaged"
    assert whole.pop("files") == len(list(folder.rglob("*.*"))) == last["files"]
    assert answer(["verify", "demo", "--json"]) == 1
    assert whole == json.loads(capsys.readouterr().out)
    assert {one["path"] for one in whole["damaged"]} == {DENSE, "config.json"}


def test_a_model_that_is_not_here(address: str) -> None:
    told = httpx.post(f"{address}/api/verify", json={"model": "none"}, timeout=60)
    assert (told.status_code, told.json()["code"]) == (404, "model_not_found")


def test_it_ends_with_its_client(own: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, _ = own
    ended = threading.Event()

    def verify(folder: Path, manifest: object, progress: object) -> list[object]:
        try:
            for step in range(10_000):
                progress("verifying", step, 10_000)  # type: ignore[operator]
                time.sleep(0.01)
        except ClientGone:
            ended.set()
            raise
        return []

    monkeypatch.setattr(checks, "verify", verify)
    body = {"model": "demo"}
    with httpx.stream("POST", f"{address}/api/verify", json=body, timeout=60) as lines:
        assert json.loads(next(lines.iter_lines()))["status"] == "verifying"
    assert ended.wait(15)
