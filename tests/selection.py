"""Choose which cases of a matrix run by default; the others have the marker `full`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def chosen(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Return positions of cases that together have each value of each parameter.

    cases: per case, its parameters by name.
    Greedy: the case with the most values that are still missing comes next, the first of equals.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    missing = set().union(*values)
    positions = []
    while missing:
        best = max(range(len(cases)), key=lambda position: len(values[position] & missing))
        missing -= values[best]
        positions.append(best)
    return positions
