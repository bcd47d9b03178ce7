"""Test what all panes share: the chosen model, the key, and how often the server is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import serving
from tests.server.page.asking import ask, told

CHANGED = "() => document.dispatchEvent(new Event('models-changed'))"
SHOWN_AGAIN = "() => document.dispatchEvent(new Event('visibilitychange'))"


@pytest.fixture(scope="module")
def address(demo_home: Path) -> Iterator[str]:
    with serving(demo_home) as found:
        yield found


def test_another_model_is_asked_and_stays_chosen(page: Any, address: str) -> None:
    told(page, [{"message": {"content": "yes"}, "done": True, "eval_count": 1}])
    names = page.locator("#model option").all_text_contents()
    assert sorted(names) == ["demo:bf16", "demo:f32"]
    chosen = page.input_value("#model")
    (other,) = {*names} - {chosen}
    page.select_option("#model", other)
    for _ in range(2):
        with page.expect_request("**/api/chat") as asked:
            found = ask(page, "hi")
        assert asked.value.post_data_json["model"] == other
        assert found.locator(".figures").inner_text() == other
        page.reload()
        page.wait_for_selector("article.own")
        assert page.input_value("#model") == other
    page.unroute("**/api/chat")
    page.fill("#question", "17+25=")
    with page.expect_response("**/api/ps"):
        page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('state').textContent === 'loaded'")
    loaded = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
    assert other in [one["name"] for one in loaded]


def test_a_waiting_answer_asks_the_server_ever_more_rarely(page: Any) -> None:
    urls = list[str]()
    page.route("**/api/chat", lambda route: None)  # never answered
    page.on("request", lambda request: urls.append(request.url.rpartition("/")[2]))
    page.fill("#question", "hi")
    page.keyboard.press("Enter")
    page.wait_for_timeout(4000)
    assert 3 <= urls.count("ps") <= 6  # after 0.3, 0.75, 1.4, 2.4 and 4 s; one of all panes
    assert urls.count("tags") <= 1  # of all panes, every 5 s
    page.get_by_role("button", name="Stop").click()


def test_an_outage_is_announced_once(page: Any) -> None:
    page.evaluate("""() => {
        window.heard = [];
        const said = document.getElementById("said");
        new MutationObserver(() => window.heard.push(said.textContent))
          .observe(said, { childList: true });
    }""")
    page.route("**/api/ps", lambda route: route.abort())
    for _ in range(2):
        with page.expect_event("requestfailed"):
            page.evaluate(CHANGED)
    page.wait_for_selector("#state:has-text('The server does not answer.')")
    page.unroute("**/api/ps")
    page.evaluate(CHANGED)
    page.wait_for_selector("#state:has-text('loaded')")
    assert page.evaluate("() => heard") == ["The server does not answer.", "The server answers."]


def test_a_key_that_is_not_given_is_asked_for_when_something_needs_it(
    browser: Any, demo_home: Path
) -> None:
    with serving(demo_home, api_key="secret") as address:
        page = browser.new_page()
        page.goto(address)
        page.get_by_role("button", name="Cancel").click()
        page.wait_for_selector("#state:has-text('API key')")
        dialog = page.locator("#key")
        for _ in range(2):
            with page.expect_response("**/api/ps"):
                page.evaluate(SHOWN_AGAIN)
        page.wait_for_timeout(200)
        assert not dialog.is_visible()
        page.fill("#question", "17+25=")
        page.keyboard.press("Enter")
        page.wait_for_selector(".told:has-text('API key')")
        page.fill("#key-value", "secret")
        page.get_by_role("button", name="Use it").click()
        page.wait_for_selector("#model option", state="attached")
        assert ask(page, "17+25=").locator(".figures.bad").count() == 0
        page.close()
