"""Test that the page can be read, heard and used by everyone: contrast, names, keys, width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.page.asking import ask, complete, told

PANES = ("chat", "experts", "models")
MARKDOWN = (
    "# Yes\n\n**bold** `code` [link](https://example.org) $$x^2$$\n\n> quote\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint(1)\n```\n\n" + "long" * 200
)
CALL = {"function": {"name": "look", "arguments": {"at": "home"}}}

# WCAG 2.2, 1.4.3 and 1.4.11: the visible texts, placeholders and borders of controls that have too
# little contrast, and how many there are. Controls that are not active are exempt.
CONTRAST = """() => {
  const numbers = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], [x, y, z]) =>
    [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a)];
  const light = (colour) => {
    const [r, g, b] = colour.map((one) => one / 255)
      .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => node
    ? over(numbers(getComputedStyle(node).backgroundColor), ground(node.parentElement))
    : [255, 255, 255];
  const opacity = (node) => node
    ? Number(getComputedStyle(node).opacity) * opacity(node.parentElement) : 1;
  const bad = [];
  let count = 0;
  const check = (node, style, text, inner = 1) => {
    if (node.closest(":disabled, [aria-disabled=true], .unseen, .skip")) return;
    if (!node.checkVisibility({ visibilityProperty: true })) return;
    const behind = ground(node), ink = numbers(style.color);
    ink[3] *= opacity(node) * inner;
    const [a, b] = [light(over(ink, behind)), light(behind)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const found = (a + 0.05) / (b + 0.05);
    count += 1;
    if (found < least) bad.push(`${text.trim().slice(0, 40)}: ${found.toFixed(2)} of ${least}`);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (texts.currentNode.data.trim() && node.tagName !== "NOSCRIPT" && node.tagName !== "OPTION") {
      check(node, getComputedStyle(node), texts.currentNode.data);
    }
  }
  for (const node of document.querySelectorAll("select")) {
    check(node, getComputedStyle(node), node.value);
  }
  for (const node of document.querySelectorAll("[placeholder]")) {
    const style = getComputedStyle(node, "::placeholder");
    check(node, style, node.placeholder, Number(style.opacity));
  }
  for (const node of document.querySelectorAll("button, input, select, textarea")) {
    const style = getComputedStyle(node), ink = numbers(style.borderTopColor);
    const around = ground(node.parentElement);
    if (!parseFloat(style.borderTopWidth) || style.borderTopStyle === "none" || !ink[3]) continue;
    if (node.matches(":disabled, [aria-disabled=true]") || !node.checkVisibility()) continue;
    const [a, b] = [light(over(ink, around)), light(around)].sort((x, y) => y - x);
    const found = (a + 0.05) / (b + 0.05);
    count += 1;
    if (found < 3) bad.push(`border of ${node.id || node.textContent}: ${found.toFixed(2)} of 3`);
  }
  return [count, bad];
}"""
UNLABELLED = """() => [...document.querySelectorAll("input, select, textarea")]
  .filter((one) => one.checkVisibility() && !one.labels.length && !one.ariaLabel)
  .map((one) => one.outerHTML)"""
OPEN_ALL = "() => document.querySelectorAll('details').forEach((one) => { one.open = true; })"
CONTROLS = {
    "application", "button", "combobox", "DisclosureTriangle", "link", "progressbar", "searchbox",
    "slider", "spinbutton", "textbox",
}  # fmt: skip
NAMED = CONTROLS | {"Canvas", "dialog", "image", "img", "log", "navigation", "region"}


def full(page: Any, address: str, pane: str) -> None:
    """Show a pane with everything that it can show."""
    if pane == "chat":
        told(page, [
            {"message": {"thinking": "so"}, "done": False},
            {"message": {"content": MARKDOWN, "tool_calls": [CALL]}, "done": False},
            {"message": {}, "done": True, "eval_count": 8, "eval_duration": 2_000_000_000},
        ])  # fmt: skip
        ask(page, "one")
        told(page, [{"error": "The server is out of memory."}])
        ask(page, "two")
        page.set_input_files("#files", {"name": "n" * 90, "mimeType": "", "buffer": b"5"})
        page.set_input_files("#files", {"name": "b.png", "mimeType": "", "buffer": b"\xff"})
        page.wait_for_selector(".told:has-text('b.png')")
        page.get_by_role("button", name="Regenerate").first.wait_for()
        page.evaluate(OPEN_ALL)
        page.wait_for_selector(".past li")
        page.get_by_role("button", name="Edit").last.click()
        return
    page.goto(f"{address}/#{pane}")
    if pane == "experts":
        page.wait_for_selector("canvas.panes-curve")
        page.wait_for_selector("canvas.panes-map")
        page.wait_for_selector(".panes-promise:has-text('promise')")
        page.evaluate(OPEN_ALL)
        page.wait_for_selector("table caption:has-text('Experts by layer')")
    else:
        page.get_by_role("button", name="Plan demo").click()
        page.wait_for_selector(".panes-plan")
        page.get_by_label("A model to add").fill("./none")
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_selector(".panes-bad")


@pytest.fixture
def loaded(page: Any) -> Iterator[Any]:
    """Return a page whose model is loaded."""
    ask(page, "17+25=")
    page.wait_for_selector("#state:has-text('loaded')")
    return page


@pytest.mark.parametrize("pane", PANES)
def test_a_pane_fits_is_named_and_can_be_read(loaded: Any, server: str, pane: str) -> None:
    page = loaded
    full(page, server, pane)
    width = "() => [document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert page.evaluate(width) == [360, 360]
    for look in ("light", "dark"):
        page.emulate_media(color_scheme=look)
        count, bad = page.evaluate(CONTRAST)
        assert count > 15
        assert bad == [], look
    assert page.evaluate(UNLABELLED) == []
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    nodes = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"]
    ]
    assert [node for node in nodes if node[0] in NAMED and not node[1].strip()] == []
    roles = Counter(role for role, _ in nodes)
    assert roles["button"] >= 2
    assert roles["combobox"] == 1
    assert roles[{"chat": "spinbutton", "experts": "slider", "models": "textbox"}[pane]] >= 1


def press_to(page: Any, name: str, key: str = "Tab") -> None:
    """Press Tab, or Shift+Tab, until the control of this name has the focus."""
    now = """() => {
      const at = document.activeElement;
      return at.getAttribute("aria-label") ?? at.labels?.[0]?.firstChild.data ?? at.textContent;
    }"""
    passed = list[str]()
    for _ in range(40):
        page.keyboard.press(key)
        passed.append(page.evaluate(now).strip())
        if passed[-1] == name:
            return
    raise AssertionError(f"{name} is not among {passed}")


def test_the_skip_link_leads_to_the_pane_that_is_shown(page: Any, address: str) -> None:
    page.goto(f"{address}/#experts")
    page.reload()
    page.wait_for_selector("#pane-experts:not([hidden])")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("() => [document.activeElement.id, location.hash]") == ["main", "#experts"]
    assert page.locator("main section:visible").get_attribute("id") == "pane-experts"
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Pause"
    for name, pane in (("none", "experts"), ("models", "models"), ("main", "models"), ("", "chat")):
        page.evaluate("""(name) => new Promise((resolve) => {
            window.addEventListener("hashchange", () => setTimeout(resolve), { once: true });
            location.hash = name;
        })""", name)  # fmt: skip
        assert page.locator("main section:visible").get_attribute("id") == f"pane-{pane}"


def test_a_whole_chat_needs_no_pointer(loaded: Any) -> None:
    page, keys = loaded, loaded.keyboard
    press_to(page, "Edit", "Shift+Tab")
    keys.press("Enter")
    keys.press("Control+a")
    keys.type("sort owl, ant")
    press_to(page, "Ask again")
    keys.press("Enter")
    assert "ant, owl" in complete(page).inner_text()
    press_to(page, "Settings")
    keys.press("Enter")
    press_to(page, "System prompt")
    keys.type("Be brief.")
    press_to(page, "Answer in JSON: a schema")
    keys.type('{"type": "string", "minLength": 900}')
    press_to(page, "Your question", "Shift+Tab")
    keys.type("Say much")
    with page.expect_request("**/api/chat") as asked:
        keys.press("Enter")
    sent = asked.value.post_data_json
    assert sent["format"] == {"type": "string", "minLength": 900}
    first, *_, last = sent["messages"]
    assert (first["content"], last["content"]) == ("Be brief.", "Say much")
    press_to(page, "Stop")
    keys.press("Space")
    assert complete(page).locator(".figures").inner_text() == "Stopped."
    press_to(page, "New chat", "Shift+Tab")
    keys.press("Enter")
    page.wait_for_selector(".empty")
    press_to(page, "History", "Shift+Tab")
    keys.press("Enter")
    page.wait_for_selector(".past li")
    press_to(page, "sort owl, ant")
    keys.press("Enter")
    page.wait_for_selector("article.own")
    press_to(page, "History", "Shift+Tab")
    keys.press("Enter")
    page.wait_for_selector(".past li")
    press_to(page, "Delete sort owl, ant")
    keys.press("Enter")
    press_to(page, "Delete")
    keys.press("Enter")
    page.wait_for_selector(".empty")
    press_to(page, "Models", "Shift+Tab")
    keys.press("Enter")
    press_to(page, "Verify demo:bf16")
    keys.press("Enter")
    page.wait_for_selector(".panes-card:has-text('all as they were pulled')")
