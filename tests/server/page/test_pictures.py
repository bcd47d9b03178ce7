"""Draw each pane in light and dark. MOEINF_DRAW=1 keeps two of them in docs/."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.page.asking import ask

KEPT = {("chat", "light"): "page-light.png", ("experts", "dark"): "page-dark.png"}
GROUND = {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 18, 22)"}
QUESTIONS = ("17+25=", "sort owl, fig, zebra, ant", "reverse planet", "spell tree", "upper fig")
MOST_BYTES = 150 << 10


class Asking(threading.Thread):
    """Ask the model one question after the other."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address, self.ended = address, threading.Event()

    def run(self) -> None:
        number = 0
        while not self.ended.is_set():
            body = {"model": "demo", "prompt": QUESTIONS[number % 5], "stream": False}
            httpx.post(f"{self._address}/api/generate", json=body, timeout=60).raise_for_status()
            number += 1


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("pane", ["chat", "experts", "models"])
def test_pictures(browser: Any, server: str, tmp_path: Path, pane: str, look: str) -> None:
    name = KEPT.get((pane, look)) if "MOEINF_DRAW" in os.environ else None
    file = Path("docs") / name if name else tmp_path / f"{pane}-{look}.png"
    size = {"width": 1000, "height": 1140 if pane == "experts" else 640}
    context = browser.new_context(color_scheme=look, viewport=size)
    page = context.new_page()
    page.goto(server)
    page.wait_for_selector("#model option", state="attached")
    for words in QUESTIONS[:2]:
        ask(page, words)
    page.goto(f"{server}/#{pane}")
    asking = Asking(server)
    if pane == "experts":
        asking.start()
        page.wait_for_selector(".panes-promise:has-text('promise')")
        page.get_by_role("img", name=re.compile("Hit rate over memory, with")).wait_for()
        page.wait_for_timeout(5000)  # some of the last minutes
    elif pane == "models":
        page.get_by_role("button", name="Plan demo").click()
        page.wait_for_selector(".panes-plan")
    page.screenshot(path=file)
    asking.ended.set()
    assert 5_000 < file.stat().st_size <= MOST_BYTES
    ground = "() => getComputedStyle(document.documentElement).backgroundColor"
    assert page.evaluate(ground) == GROUND[look]
    context.close()
    if asking.is_alive():
        asking.join(60)
