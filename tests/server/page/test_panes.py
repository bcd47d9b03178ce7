"""Test the panes Experts and Models in a real browser, against a real server.

Their shell is that of panes_shell.js, which scripts the stream of frames only.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.names import parse_name
from moeinf.server.api.library import background
from tests.server.conftest import serving

expect = pytest.importorskip(
    "playwright.sync_api", reason="the browser is driven by Playwright (extra: browser)"
).expect
HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "server/page"
CSP = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
WAIT_MS = 20_000
ASK = {"model": "demo", "prompt": "17+25=", "stream": False}
Open = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def open_pane(browser: Any) -> Iterator[Open]:
    """Return a function that opens a pane of a server; nothing may be refused or raised there."""
    problems, pages = list[str](), list[Any]()

    def file(route: Any) -> None:
        name = urlsplit(route.request.url).path.rpartition("/")[2]
        path = next(folder / name for folder in (PAGE, HERE) if (folder / name).exists())
        headers = {"Content-Type": KINDS[path.suffix], "Content-Security-Policy": CSP}
        route.fulfill(body=path.read_bytes(), headers=headers)

    def open_it(address: str, name: str) -> Any:
        page = browser.new_page(viewport={"width": 360, "height": 800})
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda told: problems.append(told.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.route(f"{address}/page/*", file)
        page.goto(f"{address}/page/panes.html#{name}")
        pages.append(page)
        return page

    yield open_it
    for page in pages:  # before their server ends
        page.close()
    assert problems == []


def loaded(address: str, **said: Any) -> dict[str, Any]:
    answered = httpx.post(f"{address}/api/generate", json={**ASK, **said}, timeout=60)
    found: dict[str, Any] = answered.raise_for_status().json()
    return found


def budget(address: str) -> int:
    (model,) = httpx.get(f"{address}/api/ps", timeout=60).json()["models"]
    size: int = model["size"]
    return size


def test_the_heat_map_follows_the_frames(server: str, open_pane: Open) -> None:
    page = open_pane(server, "Experts")
    canvas = page.locator("canvas.panes-map")
    expect(canvas).to_be_visible()
    before = canvas.evaluate("c => c.toDataURL()")
    page.wait_for_function(
        "([c, old]) => c.toDataURL() !== old", arg=[canvas.element_handle(), before]
    )
    expect(page.locator(".panes-guess")).to_have_text(
        "Read ahead: 8 B. 75 % of what is settled was used. Hits by it: 1 from the next layer's "
        "gate, 2 from the prediction."
    )
    for words in ("77 of 77 slots", "115 of 192", "12.3", "1 running, 2 waiting", "MB/s"):
        expect(page.locator(".panes")).to_contain_text(words)
    canvas.hover(position={"x": 15, "y": 15})
    expect(page.locator(".panes-told")).to_contain_text("Layer 3, expert 1: in RAM, heat 1 of 15")
    page.mouse.move(0, 0)
    canvas.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Home")
    for key, words in (
        ("ArrowRight", "expert 1:"),
        ("End", "expert 31:"),
        ("ArrowRight", "expert 31:"),
        ("Home", "expert 0:"),
    ):
        page.keyboard.press(key)
        expect(page.locator(".panes-told")).to_contain_text(words)
    page.locator("summary").first.click()
    rows = page.get_by_role("region", name="Experts by layer").locator("tbody tr")
    expect(rows).to_have_count(6)
    for row in rows.all():  # GPU, RAM and disk are all experts
        assert sum(int(cell) for cell in row.locator("td").all_inner_texts()[:3]) == 32
    assert rows.nth(2).locator("th").inner_text() == "4"  # the model's own number
    assert rows.nth(2).locator("td").all_inner_texts()[:4] == ["0", "13", "19", "41 %"]
    used = rows.first.locator("td").nth(4)
    page.wait_for_function(  # its cell stays
        "([one, was]) => one.isConnected && one.textContent !== was",
        arg=[used.element_handle(), used.text_content()],
    )
    expect(canvas).to_have_attribute("aria-label", re.compile("77 in RAM, 115 on disk"))
    page.wait_for_function("() => announced.some((text) => text.includes('expert 0: in RAM'))")
    expect(page.locator(".panes")).to_contain_text("Hit rate 90.0 %")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.get_by_role("button", name="Pause").click()
    page.wait_for_function("() => streams === 0")
    page.evaluate("chosen('demo:bf16')")  # another model while it is paused
    expect(page.locator(".panes-state").first).to_have_text("Paused.")
    page.get_by_role("button", name="Pause").click()
    page.wait_for_function("() => streams === 1")
    page.evaluate("pane.hide()")
    page.wait_for_function("() => streams === 0")
    page.close()


def test_the_slider_moves_the_memory(server: str, open_pane: Open) -> None:
    loaded(server)
    page = open_pane(server, "Experts")
    slider = page.get_by_role("slider")
    expect(page.locator(".panes-promise")).to_contain_text("replays promise")
    expect(slider).to_have_value("40")
    expect(slider).to_have_attribute("min", "5")  # 8 of 192 experts
    before = budget(server)
    slider.focus()
    page.keyboard.press("End")
    expect(page.locator(".panes-memory")).to_contain_text("192 of 192 experts")
    assert budget(server) > before
    page.keyboard.press("Home")
    expect(page.locator(".panes-memory")).to_contain_text("9 of 192 experts")
    assert budget(server) < before
    table = page.get_by_role("region", name="Hit rate over memory")
    page.locator("summary").last.click()
    expect(table.locator("tbody tr")).to_have_count(6)
    expect(table.locator("thead")).to_contain_text("belady")
    page.close()


def test_a_refused_memory_is_told_and_the_slider_goes_back(page: Any, server: str) -> None:
    loaded(server)
    page.goto(f"{server}/#experts")
    slider, size = page.get_by_role("slider"), budget(server)
    expect(page.locator(".panes-promise")).to_contain_text("iB, ")
    expect(slider).not_to_have_value("100")  # the first frame has come
    before = slider.input_value()
    slider.evaluate("one => { one.min = 1; }")  # less than the server allows
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator(".panes-memory")).to_contain_text("at least 393216 bytes")
    expect(slider).to_have_value(before)
    expect(page.locator(".panes-promise")).to_contain_text(f"{before} % of the experts")
    assert budget(server) == size


def test_models_are_planned_verified_and_deleted(
    home: Path, tmp_path: Path, open_pane: Open
) -> None:
    (tmp_path / "models/demo").mkdir(parents=True)
    copied = tmp_path / "models/demo/bf16"
    shutil.copytree(home / "models/demo/bf16", copied)
    with serving(tmp_path) as address:
        page = open_pane(address, "Models")
        card = page.locator(".panes-card").filter(has_text="demo")
        expect(card).to_contain_text("bf16")
        expect(card).to_contain_text("apache-2.0")
        card.get_by_role("button", name="Plan").click()
        expect(card).to_contain_text("demo:bf16 runs here")
        ladder = card.get_by_role("region", name="With other memory")
        expect(ladder.locator("tbody tr")).to_have_count(4)
        verify = card.get_by_role("button", name="Verify")
        verify.click()
        expect(card).to_contain_text("files, all as they were pulled")
        (copied / "config.json").write_text("<img src=x onerror=alert(1)>")
        verify.click()
        expect(card).to_contain_text("config.json has")
        assert page.locator("img").count() == 0
        delete = card.get_by_role("button", name="Delete")
        delete.click()
        page.get_by_role("dialog").get_by_role("button", name="Keep").click()
        assert Library(Settings(tmp_path)).has(parse_name("demo"))
        delete.click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.locator(".panes-state").get_by_text("No model is installed.")).to_be_visible()
        assert not Library(Settings(tmp_path)).has(parse_name("demo"))
        page.close()


def test_a_pull_shows_its_progress_and_is_cancelled(
    tmp_path: Path, open_pane: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, ended = threading.Event(), threading.Event()
    told = background.Progress.__call__

    def slowly(self: background.Progress, phase: str, done: int, total: int) -> None:
        if going.is_set() or total < 2:
            told(self, phase, done, total)
            return
        told(self, phase, total // 2, total)
        self._client.gone.wait(30)
        with pytest.raises(background.ClientGone):
            told(self, phase, done, total)
        ended.set()
        raise background.ClientGone

    monkeypatch.setattr(background.Progress, "__call__", slowly)
    with serving(tmp_path) as address:
        page = open_pane(address, "Models")
        section = page.locator(".panes").filter(has_text="A model to add")
        page.get_by_label("A model to add").fill("demo")
        page.get_by_role("button", name="Pull").click()
        bar = page.get_by_role("progressbar", name="Pulling demo")
        expect(bar).to_have_attribute("value", re.compile(r"0\.\d+"))
        page.get_by_role("button", name="Cancel").click()
        expect(section.get_by_text("Pulling demo was cancelled.")).to_be_visible()
        assert ended.wait(15)  # in the server, too
        assert not Library(Settings(tmp_path)).has(parse_name("demo"))
        going.set()
        page.get_by_role("button", name="Pull").click()
        expect(section.get_by_text("demo is pulled.")).to_be_visible()
        expect(page.locator(".panes-card h3")).to_have_text("demo")
        assert Library(Settings(tmp_path)).has(parse_name("demo"))
        page.close()


def test_the_real_page_shows_real_frames(server: str, browser: Any) -> None:
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    loaded(server)
    page.goto(f"{server}/#experts")
    canvas = page.locator("canvas.panes-map")
    expect(canvas).to_be_visible()
    page.wait_for_timeout(600)  # two frames: nothing is used any more
    before = canvas.evaluate("c => c.toDataURL()")
    loaded(server, prompt="81+12=")
    page.wait_for_function(
        "([c, old]) => c.toDataURL() !== old", arg=[canvas.element_handle(), before]
    )
    page.close()
