"""Test what the heat map shows: colour, brightness, flash and numbers of known experts."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

Colour = tuple[int, int, int]
DISK, RAM, GPU, READING, USED = 0, 1, 2, 4, 8
LAYERS, EXPERTS = 2, 4
# Cells by layer: the heat is in bits 4 to 7.
BEFORE = [DISK, RAM | 15 << 4, RAM | 3 << 4, GPU | 15 << 4, READING, RAM | 15 << 4, DISK, DISK]
FLASHED, FADED = 1, 5
PIXEL = """(canvas, [across, down]) => {
  const box = canvas.getBoundingClientRect(), ratio = canvas.width / box.width;
  const [x, y] = [across * box.width * ratio, down * box.height * ratio].map(Math.floor);
  return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
}"""

GROUND = """(one) => getComputedStyle(one).getPropertyValue("--panes-ground").trim().slice(1)
  .match(/../g).map((part) => parseInt(part, 16))"""


def line(cells: list[int], number: int) -> str:
    tier = {"experts": 3, "slots": 5, "bytes": 3 << 20}
    frame = {
        "model": "demo:bf16", "layers": LAYERS, "experts": EXPERTS, "layer_numbers": [3, 4],
        "map": base64.b64encode(bytes(cells)).decode(), "hits": 3 * number, "misses": number,
        "hit_rate": 0.75, "read_bytes_per_s": 2e6 * number, "bus_bytes_per_s": 7e6,
        "tiers": {"disk": {"experts": 4}, "ram": tier, "gpu": {**tier, "experts": 1, "slots": 2}},
        "budget_bytes": 9, "in_flight": 1, "tokens_per_s": 2.5,
        "queue": {"running": 1, "waiting": 0}, "time": 100 + number,
        "prediction": {"read_bytes": 4096, "used_bytes": 300, "wasted_bytes": 100,
                       "hits_hinted": 7, "hits_predicted": 5},
    }  # fmt: skip
    return json.dumps(frame) + "\n"


def opened(page: Any, address: str, frames: list[list[int]] | None = None) -> Any:
    """Show frames, by default two: first one expert is used, then another; return the map."""
    if frames is None:
        frames = [list(BEFORE), list(BEFORE)]
        frames[0][FADED] |= USED
        frames[1][FLASHED] |= USED
    body = "".join(line(cells, number) for number, cells in enumerate(frames, 1))
    page.route("**/api/experts?*", lambda route: route.fulfill(body=body))
    page.goto(f"{address}/#experts")
    page.wait_for_selector("canvas.panes-map")
    return page.locator("canvas.panes-map")


def middle(cell: int) -> list[float]:
    row, column = divmod(cell, EXPERTS)
    return [(column + 0.5) / EXPERTS, (row + 0.5) / LAYERS]


def colours(canvas: Any) -> list[Colour]:
    return [tuple(canvas.evaluate(PIXEL, middle(cell))) for cell in range(LAYERS * EXPERTS)]


def legend(page: Any, words: str) -> Colour:
    key = page.locator(".panes-legend li").filter(has_text=words).locator("span")
    text = key.evaluate("one => getComputedStyle(one).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", text))
    return red, green, blue


def apart(one: Colour, other: Colour) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("look", ["light", "dark"])
def test_colour_is_the_tier_brightness_the_heat_and_a_flash_the_use(
    page: Any, address: str, look: str
) -> None:
    page.emulate_media(color_scheme=look)
    canvas = opened(page, address)
    found = colours(canvas)
    ram, gpu, disk = (legend(page, words) for words in ("in RAM", "on the GPU", "on disk"))
    flash = legend(page, "used now")
    assert (found[3], found[4]) == (gpu, legend(page, "being read"))
    ground = page.locator(".panes").first.evaluate(GROUND)
    for cell, tier, heat in ((2, ram, 3), (0, disk, 0)):
        strength = 0.3 + 0.7 * heat / 15
        mixed = [g + (t - g) * strength for g, t in zip(ground, tier, strict=True)]
        assert found[cell] == pytest.approx(mixed, abs=1)
    assert 0 < apart(found[FLASHED], flash) < apart(found[FADED], flash) < apart(ram, flash)
    page.emulate_media(color_scheme=look, reduced_motion="reduce")
    page.reload()
    page.wait_for_selector("canvas.panes-map")
    still = colours(canvas)
    assert still[FLASHED] == still[FADED] == ram  # nothing flashes


def test_the_legend_has_the_colours_of_the_map_where_the_system_forces_others(
    page: Any, address: str
) -> None:
    page.emulate_media(forced_colors="active", reduced_motion="reduce")
    canvas = opened(page, address)
    assert page.evaluate("() => matchMedia('(forced-colors: active)').matches")
    found = colours(canvas)
    assert (found[FADED], found[3]) == (legend(page, "in RAM"), legend(page, "on the GPU"))
    assert found[4] == legend(page, "being read")


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (0, "Layer 3, expert 0: on disk, heat 0 of 15"),
        (FLASHED, "Layer 3, expert 1: in RAM, heat 15 of 15, used now"),
        (2, "Layer 3, expert 2: in RAM, heat 3 of 15"),
        (3, "Layer 3, expert 3: on the GPU, heat 15 of 15"),
        (4, "Layer 4, expert 0: on disk, heat 0 of 15, being read"),
    ],
)
def test_a_pointer_on_a_cell_tells_its_numbers(
    page: Any, address: str, cell: int, words: str
) -> None:
    canvas = opened(page, address)
    box = canvas.bounding_box()
    across, down = middle(cell)
    canvas.hover(position={"x": across * box["width"], "y": down * box["height"]})
    assert page.locator(".panes-told").inner_text() == words


def test_bars_figures_and_lines_of_the_last_minutes(page: Any, address: str) -> None:
    canvas = opened(page, address)
    words = "2 layers of 4 experts: 3 in RAM, 1 on the GPU, 4 on disk"
    assert canvas.get_attribute("aria-label") == words
    bars = page.locator(".panes-bar output").all_inner_texts()
    assert bars == ["1 of 2 slots, 3.0 MiB", "3 of 5 slots, 3.0 MiB", "4 of 8"]
    shares = page.locator(".panes-bar progress").evaluate_all("all => all.map((one) => one.value)")
    assert shares == [1 / 8, 3 / 8, 4 / 8]
    shown = page.locator(".panes").first.inner_text()
    for text in ("7.0 MB/s", "2.5", "75.0 %", "1 running, 0 waiting"):
        assert text in shown
    assert page.locator(".panes-guess").inner_text() == (
        "Read ahead: 4.0 KiB. 75 % of what is settled was used. "
        "Hits by it: 7 from the next layer's gate, 5 from the prediction."
    )
    now = dict(zip(("hits", "disk"), page.locator(".panes-now").all_inner_texts(), strict=True))
    assert now == {"hits": "75.0 %", "disk": "4.0 MB/s"}
    disk = page.get_by_role("img", name=re.compile("Disk in the last 3 minutes"))
    drawn = (
        "one => one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some(Boolean)"
    )
    assert disk.evaluate(drawn)


def test_a_screen_reader_does_not_hear_each_frame(page: Any, address: str) -> None:
    """The map's name changes every 5 s at most."""
    canvas = opened(page, address, [list(BEFORE), [DISK] * len(BEFORE)])
    page.wait_for_function("() => document.querySelector('.panes-now').textContent === '75.0 %'")
    assert canvas.get_attribute("aria-label").startswith("2 layers of 4 experts: 3 in RAM")
    page.wait_for_selector("canvas[aria-label*='0 in RAM, 0 on the GPU, 8 on disk']")


def test_a_line_tells_its_span_and_breaks_where_nothing_was_asked(page: Any) -> None:
    found = page.evaluate("""async () => {
      const { spark } = await import("/page/charts.js");
      const line = spark("x", String, 1), place = document.createElement("div");
      place.className = "panes";
      place.append(line.node);
      document.body.append(place);
      const points = [[0, 0.5], [0.5, 0.5], [1, null], [10, 0.5]];
      for (const [time, value] of points) line.add(time, value);
      const canvas = line.node.querySelector("canvas"), spans = [line.node.textContent];
      const drawn = [112, 160].map((x) =>
        canvas.getContext("2d").getImageData(x, 0, 1, canvas.height).data.some(Boolean));
      for (const time of [50, 170, 300]) {
        line.add(time, 0.5);
        spans.push(line.node.textContent);
      }
      return { drawn, spans };
    }""")
    assert found["drawn"] == [True, False]  # 10 s ago, and 5 s ago
    spans = ("last 20 s", "last minute", "last 3 minutes", "last 3 minutes")
    assert found["spans"] == [f"x 0.5 {span}" for span in spans]
