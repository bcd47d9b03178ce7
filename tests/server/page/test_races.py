"""Test what users do in the page while something else is still going on."""

from __future__ import annotations

from typing import Any

from tests.server.page.asking import delete_chat

DONE = '{"message": {"content": "yes"}, "done": true}\n'


def ask(page: Any, words: str) -> None:
    page.fill("#question", words)
    page.keyboard.press("Enter")


def test_a_new_chat_is_asked_at_once_while_another_answer_is_stopped(page: Any) -> None:
    page.route("**/api/chat", lambda route: None)  # never answered
    ask(page, "slow")
    page.wait_for_selector("button:has-text('Send')[disabled]")
    assert page.get_by_role("button", name="Edit").get_attribute("aria-disabled") == "true"
    page.unroute("**/api/chat")
    page.route("**/api/chat", lambda route: route.fulfill(body=DONE))
    page.evaluate("""() => {
        document.querySelector(".bar > button").click(); // New chat
        document.getElementById("question").value = "next";
        document.querySelector("form.ask").requestSubmit();
    }""")
    page.wait_for_selector("button:has-text('Send'):not([disabled])")
    assert page.locator("article .body").all_inner_texts() == ["next", "yes"]


def test_a_bad_setting_is_told_and_the_question_stays(page: Any) -> None:
    sent = list[str]()
    page.on("request", lambda request: sent.append(request.url))
    page.locator("details.settings summary").click()
    page.get_by_label("Temperature").fill("9")
    page.locator("details.settings summary").click()
    ask(page, "hi")
    page.wait_for_selector(".told:has-text('Temperature: ')")
    page.get_by_label("Temperature").fill("0.75")
    page.get_by_label("Answer in JSON").fill("{no")
    ask(page, "hi")
    page.wait_for_selector(".told:has-text('The schema is not JSON')")
    assert page.input_value("#question") == "hi"
    assert page.locator("article").count() == 0
    assert not [url for url in sent if url.endswith("/api/chat")]


def test_a_chat_that_another_tab_deletes_stays_deleted(page: Any) -> None:
    page.context.route("**/api/chat", lambda route: route.fulfill(body=DONE))
    ask(page, "one")
    page.wait_for_selector("article.answer .actions button:not([aria-disabled])")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.own")
    other.locator("details.past summary").click()
    delete_chat(other, "one")
    other.wait_for_selector(".empty")
    ask(page, "two")
    page.wait_for_selector(".told:has-text('Another tab deleted this chat')")
    page.reload()
    page.wait_for_selector(".empty")


def test_the_view_follows_a_long_answer_and_stays_on_the_screen(page: Any) -> None:
    lines = '{"message": {"content": "word\\n\\n"}, "done": false}\n' * 300
    page.route("**/api/chat", lambda route: route.fulfill(body=lines + DONE))
    ask(page, "long")
    page.wait_for_selector("article.answer .actions button:not([aria-disabled])")
    left = "(one) => one.scrollHeight - one.scrollTop - one.clientHeight"
    assert abs(page.locator(".talk").evaluate(left)) < 2
    page.locator("details.settings summary").click()
    assert page.evaluate("() => document.documentElement.scrollHeight") == 740
