"""Prepare a place where commands and requests fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moeinf import errors
from tests.errors.provoking import Place


@pytest.fixture
def place(
    demo_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Place]:
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    (home / "models").symlink_to(demo_home / "models")
    own = {"HOME": home, "HOST": "127.0.0.1:1", "LIBCUDA": folder / "no-libcuda.so"}
    for name, value in own.items():
        monkeypatch.setenv(f"MOEINF_{name}", str(value))
    hub = "huggingface_hub.constants"
    monkeypatch.setattr(f"{hub}.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(f"{hub}.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(errors, "_limit", lambda _: None)  # of the machine
    monkeypatch.chdir(folder)
    place = Place(home, folder, demo_home, monkeypatch, request)
    with place.later:
        yield place
