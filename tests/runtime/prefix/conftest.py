"""Engines with a home of their own, whose prefix cache no other test uses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeinf.runtime.config import EngineConfig, PrefixBudget, Settings
from moeinf.runtime.engine.engine import Engine
from moeinf.runtime.library.library import Library
from moeinf.runtime.sizes import parse_memory
from tests.conftest import endless

OpenHere = Callable[..., Engine]
BUDGET = PrefixBudget(64 << 20)


@pytest.fixture
def home(demo_home: Path, tmp_path: Path) -> Path:
    """Return a MOEINF_HOME with the demo, and without state."""
    shutil.copytree(demo_home / "models", tmp_path / "home/models", copy_function=os.link)
    return tmp_path / "home"


@pytest.fixture
def folder(home: Path) -> Path:
    """Return the folder of the demo's prefix cache."""
    return home / "state/demo/bf16/prefix"


@pytest.fixture
def open_here(home: Path) -> Iterator[OpenHere]:
    """Return a function that opens an engine which writes to `home`; it is closed after the test.

    Its answers have the asked length.
    """
    engines: list[Engine] = []

    def open_one(model: str = "demo:bf16", memory: str = "100%", **options: Any) -> Engine:
        settings = Settings(home)
        manifest, folder = Library(settings).read(model)
        options = {"prefix": BUDGET, **options}
        config = EngineConfig(memory=parse_memory(memory), **options)
        engines.append(Engine.open(manifest, folder, config, settings))
        endless(engines[-1])
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()
