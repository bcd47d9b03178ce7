"""Write the league's tables into docs/league.md, and draw docs/league.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scripts.league import Row

    Rows = dict[tuple[str, str, float], Row]

START = "<!-- tables of scripts/league.py -->"
_AT = 0.2  # the capacity of the detailed columns
_ORDER = (
    "belady",
    "all tokens",
    "next 8",
    "next 4",
    "next 2",
    "next 1",
    "next 0",
    "request",
    "task",
)


def tabulate(rows: Rows, path: Path) -> None:
    """Replace the tables of a page, which follow START, by those of the rows."""
    text = path.read_text().split(START)[0] + START + "\n"
    for data in dict.fromkeys(key[0] for key in rows):
        mine = {key[1:]: row for key, row in rows.items() if key[0] == data}
        text += "\n" + "\n".join(_table(data, mine)) + "\n"
    path.write_text(text)


def gap(
    mine: dict[tuple[str, float], Row], name: str, share: float, figure: str = "hit_rate"
) -> float | None:
    """Return (contestant - LRU) ÷ (Belady - LRU) at a capacity; None where one is not known."""
    found = [mine.get((one, share)) for one in (name, "lru", "belady")]
    rates = [getattr(row, figure) for row in found if row is not None]
    if len(rates) < 3 or rates[2] == rates[1]:
        return None
    return (rates[0] - rates[1]) / (rates[2] - rates[1]) + 0.0  # never -0


def _table(data: str, mine: dict[tuple[str, float], Row]) -> list[str]:
    shares = sorted({share for _, share in mine})
    names = sorted({name for name, _ in mine}, key=lambda name: _place(mine, name))
    count = max(row.requests for row in mine.values())
    lines = [f"### {data}, {count} requests" if count > 1 else f"### {data}, one request", ""]
    gaps = [share for share in (0.1, 0.2, 0.35, 0.5) if share in shares]
    head = [
        "",
        *(f"{share:.0%}" for share in shares),
        *(f"gap {share:.0%}" for share in gaps),
        f"95 % at {_AT:.0%}",
        "first 16",
        "reads",
        "gap in reads",
    ]
    lines += [_line(head), _line(["---"] * len(head))]
    for name in names:
        row = mine.get((name, _AT))
        rates = [mine.get((name, share)) for share in shares]
        closed = [gap(mine, name, share) for share in gaps]
        spared = gap(mine, name, _AT, "reads_per_token")
        lines.append(
            _line(
                [
                    name,
                    *("" if one is None else f"{one.hit_rate:.1f}" for one in rates),
                    *("" if one is None else f"{one:.2f}" for one in closed),
                    "" if row is None or count == 1 else f"{row.low:.1f} – {row.high:.1f}",
                    "" if row is None else f"{row.early:.1f}",
                    "" if row is None else f"{row.reads_per_token:.1f}",
                    "" if spared is None else f"{spared:.2f}",
                ]
            )
        )
    return lines


def _place(mine: dict[tuple[str, float], Row], name: str) -> tuple[int, float]:
    """Sort contestants by hit rate at _AT, below the bounds."""
    for place, start in enumerate(_ORDER):
        if name.startswith(start):
            return place - len(_ORDER), 0
    row = mine.get((name, _AT))
    return 0, 0 if row is None else -row.hit_rate


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def draw(rows: Rows, path: Path) -> None:
    """Draw per data set the hit rates above LRU's, by capacity."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(key[0] for key in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4.6), squeeze=False)
    contestants = sorted({key[1] for key in rows if not key[1].startswith(_ORDER[1:])})
    for data, axis in zip(names, axes[0], strict=True):
        for number, name in enumerate(contestants):
            there = sorted(key[2] for key in rows if key[:2] == (data, name))
            known = [share for share in there if (data, "lru", share) in rows]
            above = [
                rows[data, name, share].hit_rate - rows[data, "lru", share].hit_rate
                for share in known
            ]
            style = {"belady": "k--", "lru": "k-"}.get(name, "o-" if number < 10 else "s:")
            axis.plot([100 * share for share in known], above, style, ms=3, label=name)
        axis.set(xlabel="experts that fit, %", ylabel="hit rate - LRU's, points", title=data)
        axis.set_ylim(bottom=max(axis.get_ylim()[0], -25))
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
