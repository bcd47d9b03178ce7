"""Servers of the API's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from moeinf.server.engines import jobs
from tests.server.scripted import CHATML, Script, talking


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with talking(tmp_path_factory.mktemp("home"), CHATML) as address:
        yield address


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def fail_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let prompts report their progress at once. Return a function that makes the rest fail.

    Prompts of more than one window then fail after the first.
    """
    monkeypatch.setattr(jobs, "QUIET_S", 0.0)
    monkeypatch.setattr(jobs, "EVERY_S", 0.0)
    note = jobs.Job._read

    def failing(job: jobs.Job, read: int, tokens: int) -> None:
        note(job, read, tokens)
        if read:
            raise MemoryError("no room for this window")

    return lambda: monkeypatch.setattr(jobs.Job, "_read", failing)
