"""Give tests a running stage of the demo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from tests.runtime.engine.pipeline.stages import Running, stages


@pytest.fixture
def running(demo_home: Path) -> Iterator[Running]:
    """Yield a stage with the second half of the demo."""
    settings = Settings(demo_home)
    with stages(*Library(settings).read("demo"), settings, [3], 6, parallel=2) as (one,):
        yield one
