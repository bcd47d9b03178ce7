"""Choose which cases of a matrix run by default; the others have the marker `full`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def chosen(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Return positions of cases that together have each value of each parameter.

    cases: each case's parameters by name. The choice is greedy: the next case is the one with the
    most values still missing. The first one wins a tie.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    missing = set().union(*values)
    positions = []
    while missing:
        best = max(range(len(cases)), key=lambda position: len(values[position] & missing))
        missing -= values[best]
        positions.append(best)
    return positions
