"""Test the chats that the browser keeps: what is exported, and what is deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server.page.asking import ask, delete_chat, told

YES = '{"message": {"content": "yes"}, "done": true}\n'
RECORDS = """() => new Promise((resolve) => {
  const asked = indexedDB.open("moeinf", 1);
  asked.onsuccess = () => {
    const all = asked.result.transaction("talks").objectStore("talks").getAll();
    all.onsuccess = () => { asked.result.close(); resolve(all.result); };
  };
})"""

KEPT = f"async () => (await ({RECORDS})()).map((one) => one.title)"


def second_tab(page: Any) -> Any:
    """Ask in the chats one and two, and return another tab, which shows two."""
    ask(page, "one")
    page.get_by_role("button", name="New chat").click()
    ask(page, "two")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.own")
    return other


def test_all_chats_are_deleted_after_a_question(page: Any) -> None:
    """Also one that is still answered, in this tab and in another."""
    told(page, [{"message": {"content": "yes"}, "done": True}])
    other = second_tab(page)
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


def two_tabs(page: Any) -> Any:
    """Keep the chats one and two, show two with the history, and return another tab that does."""
    page.context.route("**/api/chat", lambda route: route.fulfill(body=YES))
    other = second_tab(page)
    for tab in (page, other):
        tab.locator("details.past summary").click()
        tab.wait_for_selector(".past li")
    return other


def test_a_chat_is_opened_as_another_tab_left_it(page: Any) -> None:
    other = two_tabs(page)
    other.get_by_role("button", name="one", exact=True).click()
    other.wait_for_selector("article.own:has-text('one')")
    ask(other, "more")
    other.wait_for_function(f"async () => JSON.stringify(await ({RECORDS})()).includes('more')")
    page.get_by_role("button", name="one", exact=True).click()
    page.wait_for_selector("article.own:has-text('more')")
    assert page.locator("article.own .body").all_inner_texts() == ["one", "more"]


def test_a_chat_that_another_tab_deleted_is_not_opened(page: Any) -> None:
    other = two_tabs(page)
    delete_chat(other, "one")
    other.wait_for_function("() => document.querySelectorAll('.past li').length === 1")
    page.get_by_role("button", name="one", exact=True).click()
    page.wait_for_selector(".told:has-text('Another tab deleted this chat')")
    page.wait_for_function("() => document.querySelectorAll('.past li').length === 1")
    assert page.locator("article.own .body").all_inner_texts() == ["two"]


def test_an_export_has_what_another_tab_added(page: Any) -> None:
    other = two_tabs(page)
    other.get_by_role("button", name="New chat").click()
    ask(other, "three")
    other.wait_for_selector(".past li:has-text('three')")
    with page.expect_download() as kept:
        page.get_by_role("button", name="Export").click()
    talks = json.loads(Path(kept.value.path()).read_text())
    assert [talk["title"] for talk in talks] == ["three", "two", "one"]


def test_a_chat_that_cannot_be_deleted_stays(page: Any) -> None:
    told(page, [{"message": {"content": "yes"}, "done": True}])
    ask(page, "one")
    page.evaluate("""() => {
        for (const name of ["delete", "clear"]) {
            IDBObjectStore.prototype[name] = () => { throw new Error(`no ${name}`); };
        }
    }""")
    page.locator("details.past summary").click()
    page.wait_for_selector(".past li")
    delete_chat(page, "one")
    page.wait_for_selector(".told:has-text('no delete')")
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_selector(".told:has-text('no clear')")
    ask(page, "more")
    page.wait_for_function(f"async () => JSON.stringify(await ({RECORDS})()).includes('more')")
    assert page.evaluate(KEPT) == ["one"]
    assert page.locator("article.own .body").all_inner_texts() == ["one", "more"]


def test_a_copy_that_is_not_kept_is_made_later(page: Any) -> None:
    """Two tabs continue a chat, and the browser's storage is full for a moment."""
    page.context.route("**/api/chat", lambda route: route.fulfill(body=YES))
    ask(page, "first")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.own")
    ask(other, "there")
    page.evaluate("""() => {
        const put = IDBObjectStore.prototype.put;
        IDBObjectStore.prototype.put = function (value) {
            IDBObjectStore.prototype.put = put;
            const asked = put.call(this, value);
            this.transaction.abort();
            return asked;
        };
    }""")
    ask(page, "here")
    page.wait_for_selector(".told:has-text('keeps no history')")
    page.wait_for_function(f"async () => (await ({KEPT})()).length === 2")
    assert sorted(page.evaluate(KEPT)) == ["first", "first (copy)"]
    ask(page, "again")
    page.wait_for_function(f"async () => JSON.stringify(await ({RECORDS})()).includes('again')")
    assert sorted(page.evaluate(KEPT)) == ["first", "first (copy)"]


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
