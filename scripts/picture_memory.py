"""Draw docs/memory.svg: tokens per second against memory, from the rows of docs/suite.csv.

Run: python scripts/picture_memory.py
The output is reproducible; a test compares it with the committed file.
"""

from __future__ import annotations

import csv
import math
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
DATA, PICTURE = DOCS / "suite.csv", DOCS / "memory.svg"
SCENARIO = {"prompt": "512", "decode": "32", "batch": "1", "moment": "warm"}
# Programs in the order of the legend: the name in the data, the words, the colour.
PROGRAMS = (
    ("moeinf", "moeinf (q4)", "#0969da"),
    ("llama.cpp", "llama.cpp (Q4_0), its default", "#cf222e"),
    ("llama.cpp no-repack", "llama.cpp (Q4_0), no repacking", "#e16f24"),
    ("accelerate disk", "accelerate, disk offload (bf16)", "#6e7781"),
)
SHARES = (10, 18, 35, 60, 100)
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 250, 44, 336
MOST, LEAST = 100.0, 0.1
_STYLE = """
  text { font: 13px sans-serif; fill: #1f2328 }
  .small { font-size: 11px; fill: #57606a }
  .head { font-weight: bold }
  .grid { stroke: #d0d7de }
  rect.page { fill: #ffffff }
"""


def measured() -> dict[str, dict[int, float | None]]:
    """Return tokens per second by program and share; None where a program did not survive."""
    with DATA.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if SCENARIO.items() <= row.items()]
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        speed = float(row["tokens_per_s"]) if row["status"] == "ok" else None
        found.setdefault(row["program"], {})[int(row["memory_percent"])] = speed
    return found


def _x(share: int) -> float:
    step = (WIDTH - RIGHT - LEFT) / (len(SHARES) - 1)
    return LEFT + 16 + SHARES.index(share) * (step - 8)


def _y(speed: float) -> float:
    place = math.log(speed / LEAST) / math.log(MOST / LEAST)
    return round(BOTTOM - place * (BOTTOM - TOP), 1)


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def _axes() -> list[str]:
    right = WIDTH - RIGHT + 4
    parts = []
    for power in range(-1, 3):
        y = _y(10.0**power)
        parts.append(f'<path class="grid" d="M{LEFT} {y:g}H{right}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{10.0**power:g}", "small", "end"))
    parts += [_text(_x(s), BOTTOM + 18, f"{s} %", "small", "middle") for s in SHARES]
    middle = (LEFT + right) / 2
    parts.append(
        _text(middle, BOTTOM + 38, "share of the experts that fits in memory", "", "middle")
    )
    parts.append(_text(12, 24, "tokens/s of one conversation, 512 tokens before it", "head"))
    parts.append(_text(12, HEIGHT - 8, _CAPTION, "small"))
    return parts


_CAPTION = (
    "OLMoE's sizes, 8 layers, recorded routing, Intel Xeon, 2 cores, 8 MiB of read-ahead; "
    "docs/performance/suite.md"
)


def _line(speeds: dict[int, float | None], colour: str) -> list[str]:
    """Return a line through the measured points, and a cross where the program was killed."""
    points = [(_x(share), _y(speed)) for share, speed in sorted(speeds.items()) if speed]
    parts = [f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{colour}"/>' for x, y in points]
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
    for share in (share for share, speed in sorted(speeds.items()) if speed is None):
        x, y = _x(share), BOTTOM - 8
        cross = f"M{x - 4:g} {y - 4}l8 8m0 -8l-8 8"
        parts.append(f'<path d="{cross}" stroke="{colour}" stroke-width="2"/>')
    return parts


def _labels(speeds: dict[int, float | None], colour: str, below: bool) -> list[str]:
    return [
        f'<text x="{_x(share):g}" y="{_y(speed) + (18 if below else -9):g}" text-anchor="middle" '
        f'style="fill: {colour}; font-size: 11px">{speed:g}</text>'
        for share, speed in sorted(speeds.items())
        if speed
    ]


def picture() -> str:
    """Return the picture as SVG."""
    found, x = measured(), WIDTH - RIGHT + 24
    parts = _axes()
    for number, (program, words, colour) in enumerate(PROGRAMS):
        speeds, y = found[program], TOP + 20 + 24 * number
        parts += _line(speeds, colour)
        if program != "accelerate disk":
            parts += _labels(speeds, colour, below=program != "moeinf")
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(_text(x + 12, y, words, "small"))
    parts.append(
        _text(x - 4, TOP + 20 + 24 * len(PROGRAMS), "✕ killed at the limit, or no answer", "small")
    )
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    page = f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<style>{_STYLE}</style>", page, *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
