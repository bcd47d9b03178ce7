"""Test the page's chat in a real browser, against a real server and its demo model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import serving
from tests.server.page.asking import ask, complete, delete_chat, told

ASK = {"model": "demo", "stream": False, "options": {"temperature": 0}}
QUESTION = "17+25="

# A user who closes each dialog.
_CANCELLED = """
window.asked = 0;
const shown = HTMLDialogElement.prototype.showModal;
HTMLDialogElement.prototype.showModal = function () {
  window.asked += 1;
  shown.call(this);
  Promise.resolve().then(() => this.close());
};
"""


@pytest.fixture(scope="module")
def address(demo_home: Path) -> Iterator[str]:
    with serving(demo_home, memory="40%", parallel=2) as found:
        yield found


def test_an_answer_is_that_of_the_api_with_its_figures(page: Any, address: str) -> None:
    message = {"role": "user", "content": QUESTION}
    answered = httpx.post(f"{address}/api/chat", json={**ASK, "messages": [message]}, timeout=60)
    page.locator("details.settings summary").click()
    page.get_by_label("Temperature").fill("0")
    found = ask(page, QUESTION)
    assert found.locator(".body").inner_text().strip() == answered.json()["message"]["content"]
    assert "tokens/s" in found.locator(".figures").inner_text()
    assert "hits" in found.locator(".figures").inner_text()
    wide = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not page.evaluate(wide)


def test_branches_keep_each_version_and_a_reload_shows_them(page: Any) -> None:
    ask(page, "1+1=")
    page.get_by_role("button", name="Regenerate").click()
    complete(page)
    assert page.locator("article.answer .actions span").inner_text() == "2/2"
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Changed question").fill("2+2=")
    page.get_by_role("button", name="Ask again").click()
    complete(page)
    assert page.locator("article.own .body").inner_text() == "2+2="
    page.reload()
    page.wait_for_selector("article.own")
    assert page.locator("article.own .body").inner_text() == "2+2="
    page.locator("article.own").get_by_role("button", name="Earlier version").click()
    assert page.locator("article.own .body").inner_text() == "1+1="
    assert page.locator("article.answer .actions span").inner_text() == "2/2"


def test_the_progress_of_a_long_prompt_is_told(page: Any) -> None:
    page.evaluate("""() => {
        const real = window.fetch;
        window.fetch = async (path, about) => {
            if (path !== "/api/chat") return real(path, about);
            return new Response(new ReadableStream({ start(lines) {
                const line = { message: {}, prompt_progress: { processed: 3, total: 9 } };
                lines.enqueue(new TextEncoder().encode(`${JSON.stringify(line)}\\n`));
                about.signal.addEventListener("abort", () => lines.error(new Error("stopped")));
            } }));
        };
    }""")
    page.fill("#question", "long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".figures:has-text('Reading the prompt: 3 of 9 tokens')")
    page.get_by_role("button", name="Stop").click()
    assert complete(page).locator(".figures").inner_text() == "Stopped."


def test_thinking_calls_and_progress_are_shown(page: Any) -> None:
    call = {"function": {"name": "look", "arguments": {"at": "<b>"}}}
    told(page, [
        {"message": {}, "prompt_progress": {"processed": 3, "total": 9}, "done": False},
        {"message": {"thinking": "so <i>"}, "done": False},
        {"message": {"content": "# Yes\n- *one*\n- `two`", "tool_calls": [call]}, "done": False},
        {"message": {}, "done": True, "eval_count": 9, "eval_duration": 2_000_000_000},
    ])  # fmt: skip
    found = ask(page, "hi")
    assert found.locator("details.thinking").get_attribute("open") is None
    assert found.locator(".thought").text_content() == "so <i>"
    assert found.locator(".body h3").inner_text() == "Yes"
    assert found.locator(".body li").all_inner_texts() == ["one", "two"]
    assert "Tool call: look" in found.inner_text()
    assert found.locator(".figures").inner_text() == "demo:bf16 · 4.0 tokens/s"


def test_a_server_that_dies_leaves_what_came(page: Any) -> None:
    told(page, [{"message": {"content": "half"}, "done": False}])
    found = ask(page, QUESTION)
    assert found.locator(".body").inner_text() == "half"
    assert found.locator(".figures.bad").inner_text() != ""
    page.unroute("**/api/chat")
    found.get_by_role("button", name="Retry").click()
    again = complete(page)
    assert again.locator(".figures.bad").count() == 0
    assert again.locator(".actions span").inner_text() == "2/2"


def test_stop_ends_an_answer_and_the_engine(page: Any, address: str) -> None:
    page.locator("details.settings summary").click()
    page.get_by_label("Most tokens").fill("100000")
    page.get_by_label("Answer in JSON").fill('{"type": "string", "minLength": 900}')
    page.fill("#question", "Say much")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => document.querySelector('article.answer .body')?.textContent.length > 1"
    )
    page.get_by_role("button", name="Stop").click()
    assert complete(page).locator(".figures").inner_text() == "Stopped."
    for _ in range(100):
        if "num_requests_running{" in (text := httpx.get(f"{address}/metrics").text) and (
            "} 0.0" in next(line for line in text.splitlines() if "requests_running{" in line)
        ):
            break
        page.wait_for_timeout(50)
    else:
        raise AssertionError("the engine still answers")


def test_two_tabs_files_and_the_history(page: Any) -> None:
    ask(page, "3+4=")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.own")
    other.get_by_role("button", name="New chat").click()
    other.set_input_files("#files", {"name": "n.txt", "mimeType": "text/plain", "buffer": b"5+6="})
    sent = list[dict[str, Any]]()
    other.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
    ask(other, "7+8=")
    assert sent[0]["messages"][0]["content"] == "File n.txt:\n\n5+6=\n\n7+8="
    page.locator("details.past summary").click()
    page.wait_for_selector("details.past li")
    assert page.locator("details.past li button.plain").all_inner_texts() == ["7+8=", "3+4="]
    delete_chat(page, "7+8=")
    page.wait_for_function("() => document.querySelectorAll('details.past li').length === 1")
    with page.expect_download() as kept:
        page.get_by_role("button", name="Export").click()
    talks = json.loads(Path(kept.value.path()).read_text())
    assert [talk["title"] for talk in talks] == ["3+4="]


def test_a_dropped_text_file_goes_with_the_question(page: Any) -> None:
    told(page, [{"message": {"content": "yes"}, "done": True}])
    sent = list[dict[str, Any]]()
    page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
    dropped = page.evaluate_handle("""() => {
        const found = new DataTransfer();
        found.items.add(new File(["grün\\n"], "a.txt"));
        found.items.add(new File([new Uint8Array([255, 254, 0])], "b.png"));
        return found;
    }""")
    page.dispatch_event(".talk", "dragover", {"dataTransfer": dropped})
    assert page.locator("#pane-chat.over").count() == 1
    page.dispatch_event(".talk", "drop", {"dataTransfer": dropped})
    page.wait_for_selector(".files li:has-text('a.txt (6 B)')")
    page.wait_for_selector(".told:has-text('b.png is not a text in UTF-8')")
    assert page.locator("#pane-chat.over").count() == 0
    ask(page, "Which language?")
    (message,) = sent[0]["messages"]
    assert message["content"] == "File a.txt:\n\ngrün\n\n\nWhich language?"
    assert page.locator(".files li").count() == 0
    assert page.locator("article.own .file").inner_text() == "a.txt"


def test_two_tabs_of_one_chat_keep_what_both_said(page: Any) -> None:
    told(page, [{"message": {"content": "one"}, "done": True}])
    ask(page, "first")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.own")
    told(other, [{"message": {"content": "two"}, "done": True}])
    ask(other, "there")
    ask(page, "here")
    page.locator("details.past summary").click()
    page.wait_for_function("() => document.querySelectorAll('details.past li').length === 2")
    page.get_by_role("button", name="first", exact=True).click()
    page.wait_for_function("() => document.querySelector('.talk').innerText.includes('there')")
    page.locator("details.past summary").click()
    page.get_by_role("button", name="first (copy)", exact=True).click()
    page.wait_for_function("() => document.querySelector('.talk').innerText.includes('here')")


def test_a_question_is_kept_before_its_answer_and_a_deleted_chat_stays_deleted(page: Any) -> None:
    waiting = list[Any]()
    page.route("**/api/chat", lambda route: waiting.append(route))  # never answered
    page.fill("#question", "slow")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.answer")
    page.locator("details.past summary").click()
    page.wait_for_selector("details.past li")
    page.reload()
    page.wait_for_selector("article.own")
    assert page.locator("article.own .body").inner_text() == "slow"
    assert "was closed" in page.locator("article.answer .figures.bad").inner_text()
    page.get_by_role("button", name="Retry").click()
    page.wait_for_selector("button:has-text('Send')[disabled]")
    page.locator("details.past summary").click()
    delete_chat(page, "slow")
    page.wait_for_selector("button:has-text('Send'):not([disabled])")
    page.wait_for_function("() => !document.querySelector('details.past li')")
    page.reload()
    page.wait_for_selector(".empty")
    assert page.locator("article").count() == 0


def test_the_keyboard_alone_is_enough(page: Any) -> None:
    told(page, [{"message": {"content": "yes"}, "done": True}])
    page.keyboard.type("hi")  # the question has the focus
    page.keyboard.press("Enter")
    complete(page)
    focused = "() => document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "Your question"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Regenerate"
    page.keyboard.press("Enter")
    complete(page)
    assert page.evaluate("() => document.activeElement.textContent") == "Regenerate"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(focused) == "Earlier version"
    page.keyboard.press("Enter")
    assert page.locator("article.answer .actions span").inner_text() == "1/2"
    assert page.locator("#said").text_content() == "Answer: yes"


def test_the_models_are_asked_for_once_at_a_time(browser: Any, address: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.clock.install()
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")
    for _ in range(3):
        with page.expect_response("**/api/ps"):
            page.clock.run_for(5000)
    kept = page.query_selector("#model option")
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    with page.expect_response("**/api/ps"):
        page.evaluate("() => document.dispatchEvent(new Event('models-changed'))")
    assert len([url for url in asked if url.endswith("/api/tags")]) == 1
    assert kept.evaluate("(option) => option.isConnected")  # an open list stays as it is
    context.close()


def test_a_model_shows_how_much_of_it_is_loaded(page: Any) -> None:
    """Its state follows while an answer waits for it."""
    read, name = [10], page.input_value("#model")

    def answer(route: Any) -> None:
        loading = [{"model": name, "read_bytes": read[0], "total_bytes": 200}]
        route.fulfill(json={"models": [], "loading": loading})

    page.route("**/api/chat", lambda route: None)  # it never answers
    page.route("**/api/ps", answer)
    page.fill("#question", "hi")
    page.keyboard.press("Enter")
    page.wait_for_selector("#state:has-text('loading, 5 %')")
    assert page.locator("#model option:checked").text_content() == name  # its state is beside it
    read[0] = 199
    page.wait_for_selector("#state:has-text('loading, 99 %')")
    page.unroute("**/api/ps")
    page.get_by_role("button", name="Stop").click()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Any, demo_home: Path) -> None:
    with serving(demo_home, api_key="secret") as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        page.fill("#key-value", "wrong")
        page.get_by_role("button", name="Use it").click()
        page.wait_for_selector("#key-said:has-text('refused')")
        page.fill("#key-value", "secret")
        page.get_by_role("button", name="Use it").click()
        page.wait_for_selector("#model option", state="attached")
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        assert not page.locator("#key").is_visible()
        context.close()


def test_a_key_that_is_not_given_is_not_asked_for_again(browser: Any, demo_home: Path) -> None:
    def late(route: Any) -> None:
        """Refuse it after the user has been asked for a request that was sent with it."""
        time.sleep(0.5)
        route.continue_()

    with serving(demo_home, api_key="secret") as address:
        context = browser.new_context()
        page = context.new_page()
        page.clock.install()
        page.add_init_script(_CANCELLED)
        page.route("**/api/ps", late)
        with page.expect_response("**/api/experts*"):
            page.goto(f"{address}/#experts")
        for _ in range(3):
            with page.expect_response("**/api/experts*"):
                page.clock.run_for(2000)
        page.clock.run_for(1000)
        assert page.evaluate("() => window.asked") == 2  # for the models, and for the pane
        context.close()
