"""Test the lines of `moeinf top`: any size of screen, a GPU, and answers of another form."""

from __future__ import annotations

import base64
import os
import re
from typing import Any

import numpy as np
import pytest

from moeinf.cli.chat.client import ServerError
from moeinf.cli.commands.top import frame_lines
from moeinf.cli.views.expert_frame import History, lines_of

LAYERS, EXPERTS = 48, 128


def frame(**changed: Any) -> dict[str, Any]:
    cells = np.arange(LAYERS * EXPERTS, dtype=np.uint32).astype(np.uint8)
    cells[cells & 3 == 3] = 0
    tier = {"experts": 3, "slots": 5, "bytes": 7}
    return {
        "model": "m:q4", "layers": LAYERS, "experts": EXPERTS, "layer_numbers": list(range(LAYERS)),
        "map": base64.b64encode(cells.tobytes()).decode(), "hit_rate": 0.5, "tokens_per_s": 1.0,
        "read_bytes_per_s": 2.0, "bus_bytes_per_s": 3.0, "budget_bytes": 4, "in_flight": 5,
        "tiers": {"disk": {"experts": 1}, "ram": tier, "gpu": tier},
        "queue": {"running": 1, "waiting": 2}, **changed,
    }  # fmt: skip


DISK, RAM, GPU, USED = 0, 1, 2, 8


def drawn(
    cells: list[list[int]],
    columns: int = 80,
    rows: int = 24,
    colour: bool = False,
    ascii_only: bool = False,
) -> list[str]:
    """Return the lines of the heat map of these cells; a layer's number is ten times its place."""
    raw = bytes(cell for row in cells for cell in row)
    numbers = [10 * layer for layer in range(len(cells))]
    about = {"layers": len(cells), "experts": len(cells[0]), "layer_numbers": numbers}
    shown = frame(**about, map=base64.b64encode(raw).decode())
    lines = lines_of(shown, History(), columns, rows, colour=colour, ascii_only=ascii_only)
    return [line for line in lines if re.match(r"L\d", line)]


def test_a_shade_is_a_quarter_of_the_heat() -> None:
    heats = (0, 3, 4, 7, 8, 11, 12, 15)
    rows = [[tier | heat << 4 for heat in heats] for tier in (DISK, RAM, GPU)]
    assert drawn(rows) == ["L0   ········", "L10  ░░▒▒▓▓██", "L20  11223344"]
    assert drawn(rows, ascii_only=True) == ["L0   ........", "L10  --++**##", "L20  11223344"]


def test_what_is_used_now_is_bold() -> None:
    (line,) = drawn([[RAM | 15 << 4, RAM | USED | 15 << 4, GPU | USED, DISK]], colour=True)
    parts = re.findall(r"((?:\x1b\[\d+m)+)([^\x1b]+)", line)
    plain, green, magenta, bold, dim = (f"\x1b[{code}m" for code in (0, 32, 35, 1, 2))
    assert parts == [
        (plain + green, "█"), (plain + green + bold, "█"), (plain + magenta + bold, "1"),
        (plain + dim, "·"),
    ]  # fmt: skip


def test_a_character_of_several_experts_is_the_hottest_in_the_nearest_tier() -> None:
    pairs = [
        (RAM | 3 << 4, RAM | 12 << 4), (DISK | 15 << 4, RAM), (RAM | 15 << 4, GPU),
        (DISK, DISK | 15 << 4), (GPU | 4 << 4, GPU | 8 << 4),
    ]  # fmt: skip
    row = [cell for pair in pairs for cell in pair]
    assert drawn([row], columns=10) == ["L0   █░1·3"]
    cold = [DISK] * 10
    assert drawn([cold, row, row, cold], columns=10, rows=9) == ["L0   █░1·3", "L20  █░1·3"]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 24, 100])
@pytest.mark.parametrize("columns", [1, 6, 13, 40, 80, 300])
def test_the_lines_fit_the_screen(columns: int, rows: int) -> None:
    history = History()
    for _ in range(99):
        history.add(frame())
    lines = lines_of(frame(), history, columns, rows)
    assert 1 <= len(lines) <= rows
    assert max(map(len, lines)) <= columns


def test_a_sparkline_rises_to_the_most_of_what_it_shows() -> None:
    history = History()
    for tokens in (0.0, 1.0, 4.0, 8.0):
        history.add(frame(tokens_per_s=tokens, read_bytes_per_s=8 - tokens))
    lines = lines_of(frame(tokens_per_s=8.0), history, 80, 24)
    speeds = {
        line.split()[0]: line for line in lines if line.startswith(("tokens/s", "disk", "bus"))
    }
    assert speeds["tokens/s"].split()[1:] == ["8.0", "▁▄█"]
    assert speeds["disk"].endswith("  █▇▄ ")
    assert speeds["bus"].endswith("  ████")
    plain = lines_of(frame(), history, 80, 24, ascii_only=True)
    assert all(line.isascii() for line in plain)


def test_a_name_of_a_server_moves_no_cursor() -> None:
    lines = lines_of(frame(model="m\x1b[2J"), History(), 80, 24)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_numbers": [0]}, {"layer_numbers": None}, {"layer_numbers": ["x"] * LAYERS},
        {"map": ""}, {"layers": 1}, {"tiers": []},
        {"queue": None}, {"tokens_per_s": None}, {"hit_rate": "x"}, {"budget_bytes": "x"},
    ],
    ids=lambda changed: str(changed)[:40],
)  # fmt: skip
def test_an_answer_of_another_form_is_an_error_in_words(changed: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="another form"):
        frame_lines(frame(**changed), History(), os.terminal_size((80, 24)), False)
