"""Draw one frame of `/api/experts` for a terminal: figures, sparklines, a heat map."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.runtime.sizes import format_bytes
from moeinf.runtime.visible import visible

_BARS = " ▁▂▃▄▅▆▇█"
_SHADES = "░▒▓█"
_GPU_SHADES = "1234"
_ASCII = {"·": ".", **dict(zip(_SHADES, "-+*#", strict=True))}
_ASCII |= dict(zip(_BARS, " ..--==##", strict=True)) | {"█": "#"}
_KEPT = 60  # points of a sparkline
_DIM, _GREEN, _MAGENTA, _BOLD, _PLAIN = "\x1b[2m", "\x1b[32m", "\x1b[35m", "\x1b[1m", "\x1b[0m"
_LINES_AROUND = 7  # of a frame, beside the heat map
_LABEL = 5


@dataclass
class History:
    """The last frames' speeds, the oldest first."""

    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    disk: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    bus: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, frame: dict[str, Any]) -> None:
        """Append the speeds of a frame."""
        self.tokens.append(float(frame["tokens_per_s"]))
        self.disk.append(float(frame["read_bytes_per_s"]))
        self.bus.append(float(frame["bus_bytes_per_s"]))


def cells_of(frame: dict[str, Any]) -> NDArray[np.uint8]:
    """Return the map [L, E]. Raises ValueError where it has another size."""
    try:
        cells = np.frombuffer(base64.b64decode(frame["map"], validate=True), np.uint8)
        return cells.reshape(int(frame["layers"]), int(frame["experts"]))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError("the map of experts is damaged") from error


def lines_of(
    frame: dict[str, Any],
    history: History,
    columns: int,
    rows: int,
    *,
    colour: bool = False,
    ascii_only: bool = False,
    foot: str = "",
) -> list[str]:
    """Return at most `rows` lines of at most `columns` characters, colours apart.

    foot: added to the last line, the legend. Raises ValueError.
    """
    cells = cells_of(frame)
    tiers, queue = frame["tiers"], frame["queue"]
    ram, gpu = tiers["ram"], tiers["gpu"]
    rate = "-" if frame["hit_rate"] is None else f"{frame['hit_rate']:.1%}"
    places = f"RAM {ram['experts']:,}/{ram['slots']:,}  disk {tiers['disk']['experts']:,}"
    if gpu is not None:
        places = f"GPU {gpu['experts']:,}/{gpu['slots']:,}  {places}"
    head = [
        visible(f"{frame['model']}  {frame['layers']} layers x {frame['experts']} experts"),
        f"{places}  budget {format_bytes(frame['budget_bytes'])}  "
        f"reading {frame['in_flight']:,}  hits {rate}",
        f"running {queue['running']}  waiting {queue['waiting']}",
        _speed("tokens/s", f"{frame['tokens_per_s']:.1f}", history.tokens, columns),
        _speed("disk", f"{format_bytes(int(frame['read_bytes_per_s']))}/s", history.disk, columns),
    ]
    if gpu is not None:
        bus = f"{format_bytes(int(frame['bus_bytes_per_s']))}/s"
        head.append(_speed("bus", bus, history.bus, columns))
    legend = "· disk  ░▒▓█ RAM" + ("  1234 GPU" if gpu is not None else "") + f"  by use{foot}"
    room = max(1, rows - len(head) - 1)
    found = [line[:columns] for line in head]
    found += _heat_map(cells, frame["layer_numbers"], columns, room, colour)
    found = [*found[: rows - 1], legend[:columns]]
    return ["".join(_ASCII.get(c, c) for c in line) for line in found] if ascii_only else found


def _speed(name: str, words: str, points: deque[float], columns: int) -> str:
    shown = list(points)[-max(0, columns - 24) :]
    most = max(shown, default=0.0) or 1.0
    top = len(_BARS) - 1
    bars = "".join(_BARS[min(top, -int(-point / most * top // 1))] for point in shown)
    return f"{name:<9}{words:>13}  {bars}"


def _heat_map(
    cells: NDArray[np.uint8], numbers: list[int], columns: int, rows: int, colour: bool
) -> list[str]:
    """Return a line per layer, or per few layers; a character is an expert, or a few."""
    if columns <= _LABEL:
        return []
    tall = _pooled(cells.T, columns - _LABEL).T
    small = _pooled(tall, rows)
    firsts = np.linspace(0, len(cells), len(small), endpoint=False).astype(int)
    lines = []
    for first, row in zip(firsts.tolist(), small, strict=True):
        text, style = "", ""
        for cell in row.tolist():
            char, wanted = _drawn(cell)
            if colour and wanted != style:
                text, style = f"{text}{_PLAIN}{wanted}", wanted
            text += char
        lines.append(f"L{numbers[first]:<{_LABEL - 2}d} {text}" + (_PLAIN if colour else ""))
    return lines


def _drawn(cell: int) -> tuple[str, str]:
    """Return the character of a byte of the map, and its style."""
    tier, used, shade = cell & 3, cell & 8, (cell >> 4) // 4
    if tier == 0:
        return "·", _DIM
    bold = _BOLD if used else ""
    return (_GPU_SHADES[shade], _MAGENTA + bold) if tier == 2 else (_SHADES[shade], _GREEN + bold)


def _pooled(cells: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
    """Return at most `rows` rows; each is that of its hottest expert in the nearest tier."""
    if len(cells) <= rows:
        return cells
    edges = np.linspace(0, len(cells), rows + 1).astype(int)
    order = (cells & 3).astype(np.int32) << 8 | cells
    found = [
        np.take_along_axis(cells[a:b], order[a:b].argmax(0)[None], 0)[0]
        for a, b in pairwise(edges.tolist())
    ]
    return np.array(found, np.uint8)
