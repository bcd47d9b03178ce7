"""Test the page where the browser blocks its storage, or holds what the page did not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import serving
from tests.server.page.asking import ask, told

BLOCKED = """
for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
  const get = () => { throw new DOMException(`${name} is blocked`, "SecurityError"); };
  Object.defineProperty(window, name, { get });
}
"""
YES = [{"message": {"content": "yes"}, "done": True}]


def test_a_browser_that_blocks_storage_chats(page: Any) -> None:
    page.add_init_script(BLOCKED)
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    told(page, YES)
    page.locator("details.settings summary").click()
    page.get_by_label("Temperature").fill("0.25")
    with page.expect_request("**/api/chat") as asked:
        assert ask(page, "hi").locator(".body").inner_text() == "yes"
    assert asked.value.post_data_json["options"] == {"temperature": 0.25}
    page.wait_for_selector(".told:has-text('keeps no history: indexedDB is blocked')")
    page.locator("details.past summary").click()
    page.wait_for_selector(".past button:has-text('Export')")
    assert page.locator(".past li").count() == 0


def test_a_key_is_kept_while_the_page_is_open(browser: Any, demo_home: Path) -> None:
    with serving(demo_home, api_key="secret") as address:
        page = browser.new_page()
        page.add_init_script(BLOCKED)
        page.goto(address)
        page.fill("#key-value", "secret")
        page.get_by_role("button", name="Use it").click()
        page.wait_for_selector("#model option", state="attached")
        with page.expect_response("**/api/ps") as again:
            page.evaluate("() => document.dispatchEvent(new Event('models-changed'))")
        assert again.value.status == 200
        page.close()


@pytest.mark.parametrize("text", ["null", "{no", '"x"', "[1]", '{"temperature": {}, "system": 7}'])
def test_settings_that_others_wrote_do_no_harm(page: Any, text: str) -> None:
    page.evaluate("(text) => localStorage.setItem('moeinf-settings', text)", text)
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    told(page, YES)
    with page.expect_request("**/api/chat") as asked:
        assert ask(page, "hi").locator(".body").inner_text() == "yes"
    assert asked.value.post_data_json["options"] == {}
