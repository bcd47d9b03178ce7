"""Test the pane Experts: its slider, its curve, and its map while a model answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import serving

NAMES = ("demo:bf16", "demo:f32")
LAYERS, EXPERTS = 2, 4
MOVED = {"slots": 5, "experts": 8, "memory": 5 << 20, "auto": False}
LONG = {
    "model": "demo:bf16", "prompt": "Say much", "format": {"type": "string", "minLength": 350},
    "options": {"temperature": 0, "num_predict": 400},
}  # fmt: skip
# Return how many maps are seen while an answer comes.
WATCHED = """async (asked) => {
  const answer = await fetch("/api/generate", { method: "POST", body: JSON.stringify(asked) });
  const canvas = document.querySelector("canvas.panes-map");
  const reader = answer.body.getReader(), seen = new Set();
  for (;;) {
    const { done } = await reader.read();
    if (done) return seen.size;
    seen.add(canvas.toDataURL());
  }
}"""


@pytest.fixture(scope="module")
def address(demo_home: Path) -> Iterator[str]:
    with serving(demo_home, memory="40%") as found:
        yield found


def frame(slots: int, model: str = "demo:bf16") -> str:
    """Return a line of the stream: so many of the 8 experts fit in RAM."""
    ram = {"experts": 1, "slots": slots, "bytes": 1 << 20}
    told = {
        "model": model, "layers": LAYERS, "experts": EXPERTS, "layer_numbers": [0, 1],
        "map": base64.b64encode(bytes(LAYERS * EXPERTS)).decode(), "hits": 0, "misses": 0,
        "hit_rate": None, "read_bytes_per_s": 0, "bus_bytes_per_s": 0, "budget_bytes": 9,
        "tiers": {"disk": {"experts": 7}, "ram": ram, "gpu": None}, "in_flight": 0,
        "tokens_per_s": 0, "queue": None, "prediction": None, "time": 100,
    }  # fmt: skip
    return json.dumps(told) + "\n"


@pytest.fixture
def fits(page: Any, address: str) -> Iterator[list[int]]:
    """Show the pane with frames in which so many experts fit; an empty list: the server fails."""
    slots = [4]

    def stream(route: Any) -> None:
        name = next((one for one in NAMES if one.replace(":", "%3A") in route.request.url), "")
        if slots:
            route.fulfill(body=frame(slots[0], name))
        else:
            route.fulfill(status=503, json={"error": "away"})

    page.route("**/api/experts?*", stream)
    page.goto(f"{address}/#experts")
    page.wait_for_function("() => document.getElementById('panes-memory')?.value === '50'")
    yield slots
    page.unroute("**/api/experts?*")


def until_slider(page: Any, value: int) -> None:
    page.wait_for_function(
        "(value) => document.getElementById('panes-memory').value === `${value}`", arg=value
    )


def test_the_slider_follows_again_after_a_drag_that_ends_where_it_began(
    page: Any, fits: list[int]
) -> None:
    moved = list[str]()
    page.on("request", lambda r: moved.append(r.url) if r.url.endswith("/api/memory") else None)
    slider = page.get_by_role("slider")
    page.wait_for_function("() => document.getElementById('panes-memory').min === '5'")
    slider.scroll_into_view_if_needed()
    box, thumb = slider.bounding_box(), 16
    x = box["x"] + thumb / 2 + (box["width"] - thumb) * (50 - 5) / (100 - 5)
    y = box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y)
    assert int(slider.input_value()) > 55
    fits[0] = 6  # the slider does not jump from under the pointer
    page.wait_for_timeout(2500)
    assert int(slider.input_value()) > 55
    page.mouse.move(x, y)
    assert slider.input_value() == "50"
    page.mouse.up()
    page.locator("#pane-experts h2").click()
    until_slider(page, 75)
    assert moved == []


def test_a_stream_that_ends_during_a_drag_moves_nothing(page: Any, fits: list[int]) -> None:
    moved = list[str]()
    page.on("request", lambda r: moved.append(r.url) if r.url.endswith("/api/memory") else None)
    send = """(one, kind) => {
        one.value = 90;
        one.dispatchEvent(new Event(kind, { bubbles: true }));
    }"""
    slider = page.locator("#panes-memory")
    slider.evaluate(send, "input")
    fits.clear()
    page.wait_for_selector(".panes-state:has-text('away')")
    slider.evaluate(send, "change")
    fits.append(2)
    until_slider(page, 25)
    assert moved == []


def test_a_move_of_another_model_is_not_told(page: Any, fits: list[int]) -> None:
    held = list[Any]()
    page.route("**/api/memory", lambda route: held.append(route))
    page.select_option("#model", NAMES[0])
    until_slider(page, 50)
    told = page.locator(".panes-memory .panes-state")
    slider = page.get_by_role("slider")
    slider.focus()
    with page.expect_request("**/api/memory"):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert told.inner_text() == "Moving …"
    page.select_option("#model", NAMES[1])
    page.wait_for_selector(f".panes-state:has-text('{NAMES[1]}')")
    for value in ("51%", "52%"):
        page.wait_for_timeout(200)
        route = held.pop()
        assert route.request.post_data_json == {"model": NAMES[0], "memory": value}
        with page.expect_response("**/api/memory"):
            route.fulfill(json=MOVED)
    page.wait_for_timeout(200)
    assert told.text_content() == ""
    page.get_by_role("button", name="Automatic").click()
    page.wait_for_timeout(200)
    route = held.pop()
    assert route.request.post_data_json == {"model": NAMES[1], "memory": "auto"}
    route.fulfill(json={**MOVED, "auto": True})
    page.wait_for_selector(".panes-memory:has-text('5 of 8 experts fit in 5.0 MiB, chosen auto')")
    page.select_option("#model", NAMES[0])


def test_automatic_leaves_the_memory_to_the_server(page: Any, address: str) -> None:
    """It returns to what the server's own options give, here 40 %."""
    httpx.post(f"{address}/api/generate", json={"model": NAMES[0]}, timeout=60)
    page.goto(f"{address}/#experts")
    page.select_option("#model", NAMES[0])
    page.wait_for_selector(".panes-live:not([hidden])")
    slider = page.get_by_role("slider")
    slider.focus()
    with page.expect_response("**/api/memory"):
        page.keyboard.press("End")
    page.wait_for_selector(".panes-memory:has-text('192 of 192 experts fit in 9.0 MiB.')")
    with page.expect_response("**/api/memory") as answered:
        page.get_by_role("button", name="Automatic").click()
    assert answered.value.request.post_data_json == {"model": NAMES[0], "memory": "auto"}
    told = answered.value.json()
    assert (told["auto"], told["slots"]) == (True, 76)
    page.wait_for_selector(".panes-memory:has-text('76 of 192 experts fit in 3.6 MiB, chosen')")
    until_slider(page, 40)


def test_the_map_changes_while_a_model_answers(page: Any, address: str) -> None:
    httpx.post(f"{address}/api/generate", json={"model": NAMES[0]}, timeout=60)
    page.goto(f"{address}/#experts")
    page.select_option("#model", NAMES[0])
    page.wait_for_selector("canvas.panes-map")
    page.wait_for_timeout(2000)  # an earlier flash has faded
    assert page.evaluate(WATCHED, LONG) >= 3


def test_the_curve_has_the_numbers_of_the_replays(page: Any, server: str) -> None:
    """This server has a recording."""
    found = httpx.get(f"{server}/api/simulate", params={"model": NAMES[0]}, timeout=60).json()
    rates: dict[str, list[tuple[float, float]]] = {}
    for one in found["trace"]["results"]:
        rates.setdefault(one["policy"], []).append((one["capacity"], one["hit_rate"]))
    page.goto(f"{server}/#experts")
    page.wait_for_selector("canvas.panes-curve")
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => one.open = true)")
    region = page.get_by_role("region", name="Hit rate over memory")
    heads = region.locator("thead th").all_inner_texts()
    assert heads == ["Experts in RAM", "Memory", *rates]
    assert {"lru", "belady"} < set(rates)
    rows = region.locator("tbody tr").all()
    assert len(rows) == len(rates["lru"]) == 6
    for number, row in enumerate(rows):
        share, _, *shown = row.locator("th, td").all_inner_texts()
        for policy, text in zip(rates, shown, strict=True):
            capacity, rate = rates[policy][number]
            assert float(share.removesuffix(" %")) == pytest.approx(100 * capacity, abs=0.51)
            assert float(text.removesuffix(" %")) == pytest.approx(100 * rate, abs=0.051)
    own = rates[found["policy"]]
    label = page.locator("canvas.panes-curve").get_attribute("aria-label")
    first, last = (f"{100 * own[at][1]:.0f} %" for at in (0, -1))
    assert f"{found['policy']} from {first} to {last}" in label
