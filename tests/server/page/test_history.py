"""Test the chats that the browser keeps: what is exported, and what is deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server.page.asking import ask, delete_chat, told

KEPT = """() => new Promise((resolve) => {
  const asked = indexedDB.open("moeinf", 1);
  asked.onsuccess = () => {
    const all = asked.result.transaction("talks").objectStore("talks").getAll();
    all.onsuccess = () => { asked.result.close(); resolve(all.result.map((one) => one.title)); };
  };
})"""


def test_all_chats_are_deleted_after_a_question(page: Any) -> None:
    """Also one that is still answered, in this tab and in another."""
    told(page, [{"message": {"content": "yes"}, "done": True}])
    ask(page, "one")
    page.get_by_role("button", name="New chat").click()
    ask(page, "two")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.own")
    page.unroute("**/api/chat")
    page.route("**/api/chat", lambda route: None)  # never answered
    page.fill("#question", "slow")
    page.keyboard.press("Enter")
    page.wait_for_selector("button:has-text('Send')[disabled]")
    page.locator("details.past summary").click()
    page.get_by_role("button", name="Delete all").click()
    dialog = page.get_by_role("dialog", name="Delete all 2 chats of this browser?")
    dialog.get_by_role("button", name="Keep").click()
    assert sorted(page.evaluate(KEPT)) == ["one", "two"]
    assert page.locator("article.own .body").all_inner_texts() == ["two", "slow"]
    page.get_by_role("button", name="Delete all").click()
    dialog.get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_selector(".empty")
    page.wait_for_selector("button:has-text('Send'):not([disabled])")
    page.wait_for_function("() => !document.querySelector('details.past li')")
    assert page.get_by_role("button", name="Delete all").is_disabled()
    assert page.evaluate("() => document.activeElement.textContent") == "History"
    assert page.evaluate(KEPT) == []
    told(other, [{"message": {"content": "yes"}, "done": True}])
    ask(other, "more")
    other.wait_for_selector(".told:has-text('Another tab deleted this chat')")
    page.reload()
    page.wait_for_selector(".empty")
    assert page.evaluate(KEPT) == []


def test_a_chat_is_deleted_only_after_a_question(page: Any) -> None:
    told(page, [{"message": {"content": "yes"}, "done": True}])
    ask(page, "one")
    page.locator("details.past summary").click()
    page.get_by_role("button", name="Delete one").click()
    dialog = page.get_by_role("dialog", name="Delete the chat one?")
    dialog.get_by_role("button", name="Keep").click()
    assert page.evaluate(KEPT) == ["one"]
    assert page.locator("article.own .body").inner_text() == "one"
    delete_chat(page, "one")
    page.wait_for_selector(".empty")
    assert page.evaluate(KEPT) == []


def test_the_focus_stays_in_the_history_when_a_chat_is_deleted(page: Any) -> None:
    told(page, [{"message": {"content": "yes"}, "done": True}])
    ask(page, "one")
    page.get_by_role("button", name="New chat").click()
    ask(page, "two")
    page.locator("details.past summary").click()
    for name in ("one", "two"):
        delete_chat(page, name)
        page.wait_for_function(f"() => !document.querySelector('[aria-label=\"Delete {name}\"]')")
        assert page.evaluate("() => document.activeElement.textContent") == "History"


def test_an_export_has_every_branch_of_every_chat(page: Any) -> None:
    told(page, [{"message": {"thinking": "so", "content": "yes"}, "done": True}])
    ask(page, "one")
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".actions span:has-text('2/2')")
    page.get_by_role("button", name="New chat").click()
    ask(page, "two")
    page.locator("details.past summary").click()
    with page.expect_download() as kept:
        page.get_by_role("button", name="Export").click()
    assert kept.value.suggested_filename == "moeinf-chats.json"
    newest, first = json.loads(Path(kept.value.path()).read_text())
    assert (newest["title"], first["title"]) == ("two", "one")
    said = [(node["role"], node["text"]) for node in first["nodes"].values()]
    assert said == [("user", "one"), ("assistant", "yes"), ("assistant", "yes")]
    assert first["nodes"]["2"]["thinking"] == "so"
