"""A real headless browser, for the tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeinf.cli.main import answer
from tests.server.conftest import serving

_WAIT_MS = 20_000


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip(
        "playwright.sync_api", reason="the browser is driven by Playwright (extra: browser)"
    )
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    with driver.sync_playwright() as started:
        found = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """Return a page with a history of its own; it may raise no error and break no policy."""
    context = browser.new_context(viewport={"width": 360, "height": 740})
    context.set_default_timeout(_WAIT_MS)
    found, problems = context.new_page(), list[str]()
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("dialog", lambda shown: (problems.append(shown.message), shown.dismiss()))
    found.on("console", lambda told: problems.append(told.text) if "Policy" in told.text else None)
    found.goto(address)
    found.wait_for_selector("#model option", state="attached")
    yield found
    context.close()
    assert problems == []


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with the demo and a recording of it."""
    found = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEINF_HOME", str(found))
        assert answer(["pull", "demo", "--quiet"]) == 0
        assert answer(["trace", "demo", "--dataset", "demo", "--limit", "4", "--quiet"]) == 0
    return found


@pytest.fixture(scope="package")
def server(home: Path) -> Iterator[str]:
    """Return the address of a server of that home."""
    with serving(home, memory="40%") as address:
        yield address


@pytest.fixture(scope="package")
def address(server: str) -> str:
    """Return the address of the server that tests share. Others may have moved its memory."""
    return server
