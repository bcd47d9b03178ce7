"""Draws the pictures of docs/architecture.md: one request's life and one expert's.

Run: python scripts/picture_architecture.py
Writes docs/request.svg and docs/expert.svg, always the same bytes; a test compares them with what
is committed, and checks that every file that they name exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_STYLE = """
  text { font: 13px sans-serif; fill: #1f2328 }
  .small { font-size: 11px; fill: #57606a }
  .head { font-weight: bold }
  .box { fill: #f6f8fa; stroke: #57606a }
  .used { fill: #ddf4ff; stroke: #0969da }
  .line { stroke: #8c959f; stroke-dasharray: 3 4; fill: none }
  .arrow { stroke: #1f2328; fill: none; marker-end: url(#tip) }
  .loop { fill: #fff8c5; fill-opacity: .5; stroke: #d4a72c }
  rect.page { fill: #ffffff }
"""
_TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#1f2328"/></marker>'
)


@dataclass(frozen=True)
class Message:
    """One step of a request: from lane to lane (the same: it is done there), and how."""

    start: int
    end: int
    text: str
    note: str = ""


LANES = (
    ("cli", "commands/run.py"),
    ("runtime", "engine/engine.py"),
    ("models", "layers/decoder.py"),
    ("offload", "store/expert_store.py"),
    ("native", "queue/copy_queue.h"),
)
STEPS = (
    Message(0, 1, "options → EngineConfig", "cli/commands/run.py"),
    Message(
        1,
        1,
        "the model's folder, its manifest",
        "runtime/library/library.py, runtime/library/manifest.py",
    ),
    Message(1, 1, "where bytes go, or DoesNotFit", "runtime/placement/plan.py"),
    Message(
        1,
        3,
        "dense weights are read, the store opens",
        "runtime/engine/loader.py, runtime/engine/engine.py",
    ),
    Message(1, 1, "template, and what the KV cache holds", "runtime/engine/chat.py"),
    Message(1, 2, "extend: chunks of 256, then tokens", "runtime/engine/generate.py"),
    Message(2, 3, "submit(layer, x, ids, weights)", "models/layers/decoder.py"),
    Message(3, 3, "hits are pinned, misses get victims' slots", "offload/store/expert_store.py"),
    Message(
        3,
        4,
        "demand, then what the policy wishes",
        "offload/store/transfer.py, offload/store/prefetch.py",
    ),
    Message(4, 3, "bytes, each expert checked", "native/queue/copy_queue.h, native/queue/crc32c.h"),
    Message(3, 2, "result(): hits first, misses as they come", "offload/store/compute.py"),
    Message(2, 1, "logits after the last layer", "models/layers/decoder.py"),
    Message(
        1,
        0,
        "a token is chosen, a piece of text shown",
        "runtime/sampling/sampler.py, cli/output.py",
    ),
)
_LAYER, _TOKEN = (6, 10), (5, 12)  # steps that repeat: first and last


def request() -> str:
    """The sequence of one request, top to bottom."""
    left, apart, top, step = 70, 200, 66, 44
    width, height = left + apart * (len(LANES) - 1) + 150, top + step * len(STEPS) + 20
    parts = []
    for (first, last), name, inset in ((_TOKEN, "every token", 0), (_LAYER, "every layer", 10)):
        y = top + step * first - 24
        parts.append(
            f'<rect class="loop" x="{8 + inset}" y="{y}" width="{width - 16 - 2 * inset}" '
            f'height="{step * (last - first + 1)}" rx="6"/>'
        )
        parts.append(_text(width - 20 - inset, y + 14, name, "small", "end"))
    for number, (floor, file) in enumerate(LANES):
        x = left + apart * number
        parts.append(f'<path class="line" d="M{x} 44V{height - 8}"/>')
        parts.append(f'<rect class="box" x="{x - 56}" y="8" width="112" height="36" rx="5"/>')
        parts.append(_text(x, 23, floor, "head", "middle"))
        parts.append(_text(x, 38, file, "small", "middle"))
    for number, message in enumerate(STEPS):
        y, x, end = top + step * number, left + apart * message.start, left + apart * message.end
        if message.start == message.end:
            parts.append(f'<path class="arrow" d="M{x} {y - 8}h22v12h-20"/>')
            x += 26
        else:
            parts.append(f'<path class="arrow" d="M{x} {y}H{end}"/>')
            x = min(x, end) + 8
        parts.append(_text(x, y - 5, message.text))
        parts.append(_text(x, y + 12, message.note, "small"))
    return _page(width, height, parts)


@dataclass(frozen=True)
class State:
    """Where an expert is: a box at x, y."""

    name: str
    x: int
    y: int
    about: str
    used: bool = False


STATES = {
    "disk": State("on disk", 20, 170, "a shard file with its CRC-32C"),
    "wished": State("wished", 215, 30, "queued behind all demand"),
    "loading": State("loading", 410, 170, "in a slot, a read runs"),
    "staged": State("staged", 720, 60, "resident, the first to leave"),
    "kept": State("kept", 720, 280, "resident, more probable"),
    "pinned": State("pinned", 1010, 170, "its layer computes with it", used=True),
}
# From, to, what happens, and where its words stand: dx, dy from the middle, anchor; aside: see
# _between.
MOVES = (
    ("disk", "wished", "hinted by a gate, or probable", (-12, 0, "end"), 0),
    ("wished", "loading", "a reader is idle", (12, 0, "start"), 0),
    ("disk", "loading", "a layer asks: a miss", (0, -6, "middle"), 0),
    ("loading", "staged", "read and checked", (-14, -4, "end"), 0),
    ("staged", "kept", "1 + ε times as probable as the least kept", (-6, 42, "end"), -14),
    ("kept", "staged", "displaced by that one", (6, 0, "start"), 14),
    ("staged", "pinned", "asked for: a hit", (14, -4, "start"), 0),
    ("kept", "pinned", "asked for: a hit", (10, 30, "start"), 0),
)
_BOX = (190, 46)


def expert() -> str:
    """The states of one expert and what moves it between them."""
    parts = []
    for start, end, text, (dx, dy, anchor), aside in MOVES:
        x1, y1, x2, y2 = _between(STATES[start], STATES[end], aside)
        parts.append(f'<path class="arrow" d="M{x1} {y1}L{x2} {y2}"/>')
        parts.append(_text((x1 + x2) // 2 + dx, (y1 + y2) // 2 + dy, text, "small", anchor))
    parts.append('<path class="arrow" d="M815 326V370H115V216"/>')
    evicted = "evicted: the policy's victim, a staged one where there is one, never a pinned one"
    parts.append(_text(465, 364, evicted, "small", "middle"))
    parts.append(_text(1105, 234, "computed: unpinned, and staged", "small", "middle"))
    parts.append(_text(1105, 249, "or kept as it was before", "small", "middle"))
    for state in STATES.values():
        kind = "used" if state.used else "box"
        parts.append(
            f'<rect class="{kind}" x="{state.x}" y="{state.y}" width="{_BOX[0]}" '
            f'height="{_BOX[1]}" rx="6"/>'
        )
        middle = state.x + _BOX[0] // 2
        parts.append(_text(middle, state.y + 19, state.name, "head", "middle"))
        parts.append(_text(middle, state.y + 36, state.about, "small", "middle"))
    return _page(1220, 390, parts)


def _between(start: State, end: State, aside: int) -> tuple[int, int, int, int]:
    """From the side of one box to the side of the other."""
    if start.x == end.x:  # one above the other, arrows `aside` of the middle
        x = start.x + _BOX[0] // 2 + aside
        down = end.y > start.y
        return x, start.y + (_BOX[1] if down else 0), x, end.y + (0 if down else _BOX[1])
    return start.x + _BOX[0], start.y + _BOX[1] // 2, end.x, end.y + _BOX[1] // 2


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x}" y="{y}"{kind}{anchor}>{escape(text)}</text>'


def _page(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", _TIP, page, *parts, "</svg>", ""])


def pictures() -> dict[str, str]:
    """By file name in docs."""
    return {"request.svg": request(), "expert.svg": expert()}


def main() -> None:
    for name, text in pictures().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
