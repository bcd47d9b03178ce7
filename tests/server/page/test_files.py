"""Test files and texts that are dragged over the page, and files that are removed again."""

from __future__ import annotations

from typing import Any

import pytest

# Return whether the page keeps the browser from its own way, for the drag and the drop.
DROP = """([selector, isFile]) => {
  const data = new DataTransfer(), place = document.querySelector(selector);
  if (isFile) data.items.add(new File(["5"], "a.txt"));
  else data.setData("text/plain", "word");
  return ["dragover", "drop"].map((name) => !place.dispatchEvent(
    new DragEvent(name, { dataTransfer: data, bubbles: true, cancelable: true })));
}"""
FOCUSED = "() => document.activeElement.ariaLabel ?? document.activeElement.textContent"


@pytest.mark.parametrize(
    ("place", "is_file", "prevented", "files"),
    [
        (".talk", True, True, ["a.txt (1 B)×"]),
        ("#question", True, True, ["a.txt (1 B)×"]),
        ("#question", False, False, []),  # the browser inserts the text
        ("header", True, True, []),  # else the browser opens the file
        ("header", False, False, []),
    ],
)
def test_only_files_are_taken_from_the_browser(
    page: Any, place: str, is_file: bool, prevented: bool, files: list[str]
) -> None:
    assert page.evaluate(DROP, [place, is_file]) == [prevented, prevented]
    page.wait_for_function(f"() => document.querySelectorAll('.files li').length === {len(files)}")
    assert page.locator(".files li").all_inner_texts() == files
    assert page.locator("#pane-chat.over").count() == 0


def test_a_file_that_is_dropped_on_another_pane_does_not_replace_the_page(
    page: Any, address: str
) -> None:
    page.goto(f"{address}/#models")
    page.reload()
    page.wait_for_selector("#pane-models:not([hidden])")
    assert page.evaluate(DROP, ["#pane-models", True]) == [True, True]


def test_the_focus_stays_among_the_files(page: Any) -> None:
    for name in "abc":
        page.set_input_files("#files", {"name": name, "mimeType": "", "buffer": b"5"})
        page.wait_for_selector(f"[aria-label='Remove {name}']")
    page.get_by_role("button", name="Remove b").focus()
    for focused in ("Remove c", "Remove a", "File"):
        page.keyboard.press("Enter")
        assert page.evaluate(FOCUSED) == focused
    assert page.locator(".files li").count() == 0
