"""Test what becomes of an answer's Markdown in the page: nodes, and never markup."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.server.page.asking import ask, told

BAD = (
    '<img src=x onerror="window.hit=1"><script>window.hit=1</script>\n\n'
    "[a](javascript:window.hit=1) [b](data:text/html,x) ![c](http://example.invalid/c.png)\n\n"
    "| <b>x</b> | y |\n|---|---|\n| <svg onload=window.hit=1> | z |\n\n```js\nwindow.hit=1\n```\n\n"
)


def test_marks_become_nodes(page: Any) -> None:
    text = (
        "**bold** *slanted* ~~gone~~ `code` $$x^2$$ \\(a\\) [link](https://example.org)\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n> quote\n\n1. one\n   - deep\n2. two\n"
    )
    told(page, [{"message": {"content": text}, "done": False}, {"message": {}, "done": True}])
    body = ask(page, "hi").locator(".body")
    for name, texts in (
        ("strong", ["bold"]), ("em", ["slanted"]), ("s", ["gone"]), ("code.math", ["x^2", "a"]),
        ("a", ["link"]), ("th", ["a", "b"]), ("td", ["1", "2"]), ("blockquote", ["quote"]),
        ("li li", ["deep"]), ("ol > li > p", ["one", "two"]),
    ):  # fmt: skip
        assert body.locator(name).all_inner_texts() == texts


def test_hostile_output_does_nothing(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    text = BAD + "a" * 1_000_000
    told(page, [{"message": {"content": text}, "done": False}, {"message": {}, "done": True}])
    found = ask(page, "hi")
    assert found.locator(".body :is(img, script, svg, b, iframe)").count() == 0
    assert found.locator(".body a").count() == 1  # the address of the picture, as a link
    assert found.locator(".body a").get_attribute("rel") == "noopener noreferrer nofollow"
    assert "<img src=x" in found.inner_text()
    assert page.evaluate("() => window.hit ?? null") is None
    assert not [url for url in asked if "example.invalid" in url]


def test_a_heading_behind_a_tab_keeps_its_text(page: Any) -> None:
    text = "#\tOne two\n\n##\tThree\n\n### \tFour #\n\n#\tx y z"
    told(page, [{"message": {"content": text}, "done": False}, {"message": {}, "done": True}])
    found = ask(page, "hi").locator(".body :is(h1, h2, h3, h4, h5, h6)")
    heads = found.evaluate_all("all => all.map((one) => `${one.tagName} ${one.textContent}`)")
    assert heads == ["H3 One two", "H4 Three", "H5 Four", "H3 x y z"]


def test_a_line_of_spaces_does_not_hold_the_page(page: Any) -> None:
    spaces = " " * 500_000
    for text in (
        f"a|b\n-{spaces}x", f"a|b\n-|-\nc{spaces}d|e|f", "`" * 19_999, f"-{spaces}a\u2028b",
        f"1.{spaces}a\rb", f"-{spaces}a\u2029b\n- c",
    ):  # fmt: skip
        told(page, [{"message": {"content": text}, "done": False}, {"message": {}, "done": True}])
        begun = time.monotonic()
        found = ask(page, "hi")
        assert found.locator(".figures.bad").count() == 0
        assert time.monotonic() - begun < 10  # quadratic searches took minutes


@pytest.mark.parametrize("text", ["a|b\n-|-\n" + "1|2\n" * 120_000, "a\n\n" * 150_000])
@pytest.mark.full
def test_more_nodes_than_a_call_takes_arguments(page: Any, text: str) -> None:
    lines = [{"message": {"content": text}, "done": False}, {"message": {}, "done": True}]
    told(page, lines)
    found = ask(page, "hi")
    assert found.locator(".figures.bad").count() == 0
    assert found.locator(".body :is(tbody tr, p)").count() >= 120_000


def test_other_ends_of_lines_are_kept_in_their_block(page: Any) -> None:
    """A lone CR ends a line, as in CommonMark; U+2028 does not."""
    text = "- one\r- two\u2028more\r\n\r\n```\na\u2028b\n```"
    told(page, [{"message": {"content": text}, "done": True}])
    body = ask(page, "hi").locator(".body")
    assert body.locator("li").all_text_contents() == ["one", "two\u2028more"]
    assert body.locator("pre code").all_text_contents() == ["a\u2028b"]


def test_a_cell_has_escaped_bars(page: Any) -> None:
    text = "| a | b |\n|---|---|\n| x \\| y | `p \\| q` |\n| 1 | 2 \\|"
    told(page, [{"message": {"content": text}, "done": True}])
    body = ask(page, "hi").locator(".body")
    assert body.locator("td").all_text_contents() == ["x | y", "p | q", "1", "2 |"]
    assert body.locator("td code").all_text_contents() == ["p | q"]


def test_hostile_calls_and_names_of_files_do_nothing(page: Any) -> None:
    bad = "<img src=x onerror=window.hit=1>"
    function = {"name": bad, "arguments": {bad: [bad, "</code></pre>" + bad]}}
    message = {"content": "yes", "thinking": bad, "tool_calls": [{"function": function}]}
    told(page, [{"message": message, "done": False}, {"message": {}, "done": True}])
    page.set_input_files("#files", {"name": bad, "mimeType": "text/plain", "buffer": b"5"})
    page.wait_for_selector(".files li")
    assert bad in page.locator(".files li").inner_text()
    ask(page, bad)
    for _ in range(2):  # also from the history
        page.wait_for_selector("article.answer .code")
        assert page.locator("article.own .file").inner_text() == bad
        assert page.locator("article.own .body").inner_text() == bad
        shown = page.locator("article.answer .code").inner_text()
        assert f"Tool call: {bad}" in shown
        assert f"</code></pre>{bad}" in shown
        page.locator("details.past summary").click()
        page.wait_for_selector(".past li")
        assert page.locator("img").count() == 0
        page.reload()
        page.wait_for_selector("article.own")
    assert page.evaluate("() => window.hit ?? null") is None


def test_code_is_copied_as_it_was_written(page: Any) -> None:
    code = "if a < b:\n    print('<b>&amp;')\n"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    told(page, [{"message": {"content": f"Run:\n\n```python\n{code}```\n"}, "done": True}])
    found = ask(page, "hi")
    found.get_by_role("button", name="Copy", exact=True).click()
    found.get_by_role("button", name="Copied").wait_for()
    read = "() => navigator.clipboard.readText()"
    assert page.evaluate(read) == code.removesuffix("\n")
    found.get_by_role("button", name="Copy answer").click()
    page.wait_for_function(f"async () => (await ({read})()).startsWith('Run:')")
    assert page.evaluate(read) == f"Run:\n\n```python\n{code}```\n"


def test_an_answer_is_copied_over_plain_http(page: Any) -> None:
    """There, from another machine, a browser has no clipboard for scripts."""
    told(page, [{"message": {"content": "**yes**"}, "done": True}])
    found = ask(page, "hi")
    page.evaluate("""() => {
        Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.addEventListener("copy", (event) => { window.copied = event.target.value; });
    }""")
    found.get_by_role("button", name="Copy answer").click()
    found.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("() => window.copied") == "**yes**"
    assert page.evaluate("() => document.activeElement.textContent") == "Copied"
    assert page.locator("body > textarea").count() == 0


def test_marks_within_marks_and_marks_that_are_text(page: Any) -> None:
    text = r"**bold *both* end** ***all*** _low_ snake_case_name \*plain\* 2 * 3 * 4 C:\dir"
    told(page, [{"message": {"content": text}, "done": True}])
    body = ask(page, "hi").locator(".body")
    assert body.locator("strong").all_inner_texts() == ["bold both end", "all"]
    assert body.locator("em").all_inner_texts() == ["both", "all", "low"]
    assert body.inner_text() == (r"bold both end all low snake_case_name *plain* 2 * 3 * 4 C:\dir")
