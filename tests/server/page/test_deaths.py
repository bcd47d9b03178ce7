"""Test the page while its server is killed and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.conftest import environment
from tests.cli.warm import started
from tests.server.page.asking import ask, complete

WAIT_MS = 20_000


def test_a_killed_server_leaves_what_came_and_comes_back(browser: Any, home: Path) -> None:
    server, address, said = started(["--port", "0"], environment(home))
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
        page.wait_for_function(
            "() => document.querySelector('article.answer .body')?.textContent.length > 1"
        )
        server.kill()
        server.wait(20)
        answer = complete(page)
        assert "The server does not answer" in answer.locator(".figures.bad").inner_text()
        page.wait_for_selector("#state:has-text('The server does not answer.')")
        kept = answer.locator(".body").inner_text()
        assert len(kept) > 1
        page.goto(f"http://{address}/#models")
        page.wait_for_selector(".panes-state:has-text('The server does not answer.')")
        said.close()
        server, _, said = started(["--port", address.rpartition(":")[2]], environment(home))
        page.wait_for_selector("#state:has-text('not loaded')")
        page.wait_for_selector(".panes-card")
        page.goto(f"http://{address}/#chat")
        assert answer.locator(".body").inner_text() == kept
        page.get_by_label("Answer in JSON").fill("")
        assert ask(page, "17+25=").locator(".figures.bad").count() == 0
    finally:
        context.close()
        server.kill()
        server.wait(20)
        said.close()
