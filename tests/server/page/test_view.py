"""Test that an answer that grows disturbs neither the view nor the focus nor a selection."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.page.asking import complete, told

# Answers that the test feeds, line by line.
STREAM = """() => {
  const real = window.fetch, text = new TextEncoder();
  window.fetch = async (path, about) => {
    if (path !== "/api/chat") return real(path, about);
    return new Response(new ReadableStream({ start(lines) {
      window.feed = (line) => lines.enqueue(text.encode(`${JSON.stringify(line)}\\n`));
      window.end = () => lines.close();
      about.signal.addEventListener("abort", () => lines.error(new Error("stopped")));
    } }));
  };
}"""
SELECT = """() => {
  const range = document.createRange();
  range.selectNodeContents(document.querySelector("article.answer pre code"));
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}"""
CODE = "```python\nprint(1)\n```\n\n"


@pytest.fixture
def growing(page: Any) -> Any:
    """Return a page that waits for an answer's lines."""
    page.evaluate(STREAM)
    page.fill("#question", "hi")
    page.keyboard.press("Enter")
    page.wait_for_function("() => window.feed")
    return page


def feed(page: Any, done: bool = False, **message: str) -> None:
    page.evaluate("(line) => window.feed(line)", {"message": message, "done": done})
    if done:
        page.evaluate("() => window.end()")
        complete(page)


def test_focus_and_selection_stay_in_what_is_complete(growing: Any) -> None:
    page = growing
    feed(page, content=f"{CODE}One")
    page.wait_for_selector(".body p:has-text('One')")
    page.get_by_role("button", name="Copy", exact=True).focus()
    page.evaluate(SELECT)
    feed(page, content=" more")
    page.wait_for_selector(".body p:has-text('One more')")
    assert page.evaluate("() => getSelection().toString()") == "print(1)"
    assert page.evaluate("() => document.activeElement.textContent") == "Copy"
    feed(page, content="\n\n```\nopen")
    page.wait_for_selector(".code:has-text('open')")
    feed(page, content=" end\n```\n- one")
    page.wait_for_selector(".body li:has-text('one')")
    feed(page, content="\n- two", done=True)
    body = page.locator("article.answer .body")
    assert body.locator("pre code").all_inner_texts() == ["print(1)", "open end"]
    assert body.locator("li").all_inner_texts() == ["one", "two"]
    assert body.locator("p").all_inner_texts() == ["One more", "one", "two"]


def test_a_selection_outlives_the_end_of_the_answer(growing: Any) -> None:
    page = growing
    feed(page, content=f"{CODE}One")
    page.wait_for_selector(".body p:has-text('One')")
    page.evaluate(SELECT)
    feed(page, content=" more", done=True)
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.evaluate("() => getSelection().toString()") == "print(1)"


def test_the_focus_stays_on_the_second_of_two_equal_buttons(growing: Any) -> None:
    page = growing
    feed(page, content=f"{CODE}{CODE}One")
    page.wait_for_selector(".body p:has-text('One')")
    page.get_by_role("button", name="Copy", exact=True).nth(1).focus()
    feed(page, content=" more", done=True)
    page.get_by_role("button", name="Regenerate").wait_for()
    second = page.locator("article.answer .code button").nth(1)
    assert second.evaluate("(one) => one === document.activeElement")


def test_thinking_that_was_opened_stays_open(growing: Any) -> None:
    page = growing
    feed(page, thinking="so")
    page.locator("article.answer details.thinking summary").click()
    feed(page, thinking=" it", content="yes")
    page.wait_for_selector(".thought:has-text('so it')")
    feed(page, done=True)
    opened = page.locator("article.answer details.thinking")
    assert opened.evaluate("(one) => one.open")
    opened.locator("summary").click()
    told(page, [{"message": {"thinking": "new", "content": "no"}, "done": True}])
    page.evaluate("() => { window.fetch = undefined; delete window.fetch; }")
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".actions span:has-text('2/2')")
    complete(page)
    page.get_by_role("button", name="Earlier version").click()
    assert not page.locator("article.answer details.thinking").evaluate("(one) => one.open")


def test_the_view_stays_where_the_user_has_scrolled(growing: Any) -> None:
    page = growing
    talk = page.locator(".talk")
    feed(page, content="word\n\n" * 100)
    page.wait_for_function("() => document.querySelectorAll('.body p').length === 100")
    talk.evaluate("(one) => { one.scrollTop = 50; }")
    feed(page, content="more\n\n")
    page.wait_for_selector(".body p:has-text('more')")
    feed(page, done=True)
    page.get_by_role("button", name="Regenerate").wait_for()
    assert talk.evaluate("(one) => one.scrollTop") == 50
    talk.evaluate("(one) => { one.scrollTop = one.scrollHeight; }")
    assert talk.evaluate("(one) => one.scrollTop") > 1000


def test_a_file_that_is_dropped_at_the_last_moment_is_sent(page: Any) -> None:
    told(page, [{"message": {"content": "yes"}, "done": True}])
    sent = list[dict[str, Any]]()
    page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
    page.evaluate("""() => {
        const found = new DataTransfer();
        found.items.add(new File(["5"], "a.txt"));
        const about = { dataTransfer: found, bubbles: true, cancelable: true };
        const drop = new DragEvent("drop", about);
        document.querySelector(".talk").dispatchEvent(drop);
        document.getElementById("question").value = "hi";
        document.querySelector("form.ask").requestSubmit();
        document.querySelector("form.ask").requestSubmit();
    }""")
    page.wait_for_selector("article.answer .actions button")
    complete(page)
    assert [one["messages"][-1]["content"] for one in sent] == ["File a.txt:\n\n5\n\nhi"]
