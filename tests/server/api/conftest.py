"""Servers of the API's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.scripted import CHATML, Script, talking


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with talking(tmp_path_factory.mktemp("home"), CHATML) as address:
        yield address


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)
