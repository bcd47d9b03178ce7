"""A count of a prompt's tokens waits for no other request."""

from __future__ import annotations

import pytest

from moeinf.runtime.generation.events import Ended, Failed, Piece
from moeinf.runtime.requests import Limits
from moeinf.server.engines.worker import Worker
from tests.server.engines.test_worker import Asked
from tests.server.engines.test_worker import worker as worker
from tests.server.scripted import Script


def test_a_count_needs_no_place(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch).say("x" * 300)
    long, count = Asked(), Asked()
    long.may.set()
    count.may.set()
    long.job.limits, count.job.counts = Limits(250), True
    count.heard = long.heard
    count.job.emit = long.heard.put
    worker.submit(long.job)
    assert isinstance(long.heard.get(timeout=20), Piece)
    worker.submit(count.job)
    first, last = long.last(), long.last()
    assert first == Ended("stop", prompt_tokens=8)
    assert isinstance(last, Ended)
    assert last.tokens == 250
    broken = Asked()
    broken.job.counts = True
    broken.job.prepare = lambda _: [][0]
    worker.submit(broken.job)
    assert isinstance(broken.last(), Failed)
    assert worker.idle
