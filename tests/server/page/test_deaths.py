"""Test the page while its server is killed and started again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.cli.conftest import environment
from tests.cli.warm import Warm
from tests.server.page.asking import ask, complete

WAIT_MS = 20_000


def started(home: Path, port: str, log: Path) -> tuple[Warm, str]:
    """Return a server of its own process, and its address, once it listens."""
    with log.open("wb") as stderr:
        server = Warm(["serve", "--port", port], environment(home), stderr=stderr)
    with log.open(encoding="utf-8") as said:
        while not (found := re.search(r"http://(\S+)\n", said.read())):
            assert server.poll() is None
            said.seek(0)
    return server, found[1]


def test_a_killed_server_leaves_what_came_and_comes_back(
    browser: Any, home: Path, tmp_path: Path
) -> None:
    server, address = started(home, "0", tmp_path / "log")
    context = browser.new_context(viewport={"width": 360, "height": 740})
    context.set_default_timeout(WAIT_MS)
    try:
        page = context.new_page()
        page.goto(f"http://{address}")
        page.locator("details.settings summary").click()
        page.get_by_label("Most tokens").fill("100000")
        page.get_by_label("Answer in JSON").fill('{"type": "string", "minLength": 400}')
        page.fill("#question", "Say much")
        page.keyboard.press("Enter")
        body = page.locator("article.answer .body")
        page.wait_for_function(
            "() => document.querySelector('article.answer .body')?.textContent.length > 1"
        )
        server.kill()
        server.wait(20)
        found = complete(page)
        assert "The server does not answer" in found.locator(".figures.bad").inner_text()
        page.wait_for_selector("#state:has-text('the server does not answer')")
        kept = body.inner_text()
        assert len(kept) > 1
        page.goto(f"http://{address}/#models")
        page.wait_for_selector(".panes-state:has-text('The server does not answer.')")
        server, _ = started(home, address.rpartition(":")[2], tmp_path / "log")
        page.wait_for_selector("#state:has-text('not loaded')")
        page.wait_for_selector(".panes-card")
        page.goto(f"http://{address}/#chat")
        page.get_by_label("Answer in JSON").fill("")
        assert body.inner_text() == kept
        assert ask(page, "17+25=").locator(".figures.bad").count() == 0
    finally:
        context.close()
        server.kill()
        server.wait(20)
