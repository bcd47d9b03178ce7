"""Define the columns of result tables: name, cell and meaning. The input is that of --json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moeinf.cli.output import Output
from moeinf.runtime.sizes import format_bytes

Result = dict[str, Any]
Cell = Callable[[Result], str]


@dataclass(frozen=True)
class Column:
    """One column. meaning: its line in the legend; empty if the name says it."""

    name: str
    cell: Cell
    meaning: str = ""


def percent(field: str, digits: int = 0) -> Cell:
    """Return a cell of a share."""
    return lambda result: "-" if result[field] is None else f"{result[field]:.{digits}%}"


def number(field: str, digits: int, divisor: float = 1, unit: str = "") -> Cell:
    """Return a cell of a number divided by `divisor`, with its unit."""
    return lambda result: (
        "-" if result[field] is None else f"{result[field] / divisor:.{digits}f}{unit}"
    )


def size(field: str) -> Cell:
    """Return a cell of a number of bytes."""
    return lambda result: format_bytes(result[field])


def print_table(
    out: Output, columns: Sequence[Column], results: Sequence[Result], keys: int
) -> None:
    """Print one line per result. keys: how many columns name a result."""
    rows = [[column.cell(result) for column in columns] for result in results]
    out.table([column.name for column in columns], rows, keys)


def legend(columns: Sequence[Column]) -> list[tuple[str, str]]:
    """Return the name and the meaning of every column that needs words."""
    return [(column.name, column.meaning) for column in columns if column.meaning]
