"""Count injected faults and their outcomes; `scripts/faults.py` prints them as a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_LOG = os.environ.get("MOEINF_FAULTS_LOG")

EVERY = _LOG is not None  # scripts/faults.py tries every point
STRIDE = 1 if EVERY else 12  # of points with -m full

Tally = Callable[[str], None]


_ALL = pytest.param("all", marks=[pytest.mark.full, pytest.mark.timeout(1800)])


@pytest.fixture(params=["some", _ALL])
def every_point(request: pytest.FixtureRequest) -> bool:
    """Return whether to try every STRIDE-th injection point, however long it takes."""
    return bool(request.param == "all")


@pytest.hookimpl(trylast=True)  # after the marks have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop cases of some points where the same case with more points runs, too."""
    more = {_case(item) for item in items if _points(item) == "all"}
    dropped = [item for item in items if _points(item) == "some" and _case(item) in more]
    config.hook.pytest_deselected(items=dropped)
    gone = set(dropped)
    items[:] = [item for item in items if item not in gone]


def _points(item: pytest.Item) -> object:
    return item.callspec.params.get("every_point") if hasattr(item, "callspec") else None


def _case(item: pytest.Item) -> str:
    """Return the name of a case without its points: `every_point` comes first in its id."""
    name, _, case = item.nodeid.partition("[")
    return name + case.removeprefix("some").removeprefix("all")


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Yield a function that counts injections by outcome.

    Example: tally("named error").
    """
    outcomes: Counter[str] = Counter()

    def count(outcome: str) -> None:
        outcomes[outcome] += 1

    failed = request.session.testsfailed
    yield count
    assert outcomes or request.session.testsfailed > failed, "nothing was injected"
    if _LOG is not None:
        with Path(_LOG).open("a") as log:
            log.write(json.dumps({"test": request.node.nodeid, "outcomes": outcomes}) + "\n")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile shim.c; a process that preloads it can be told which calls fail."""
    if sys.platform != "linux":
        pytest.skip("needs Linux: preloads a library")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    build = ["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-ldl"]
    try:
        subprocess.run(build, check=True)
    except FileNotFoundError:
        pytest.skip("there is no gcc to build the shim with")
    return library
