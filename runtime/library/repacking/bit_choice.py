"""Choose a format for every matrix, so that the errors that count are least within some bytes.

Each matrix has options: bytes and a cost, which is its error times its importance. The choice
starts with the smallest options. It then takes the steps with the largest gain per byte, along the
lower convex hull of each matrix's options, while they fit. Ties go to the first matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Option(NamedTuple):
    """A format for a matrix."""

    form: str
    size_bytes: int
    cost: float


def hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of cost over bytes, the smallest first."""
    found: list[Option] = []
    for option in sorted(options, key=lambda x: (x.size_bytes, x.cost)):
        if found and option.cost >= found[-1].cost:
            continue
        if found and option.size_bytes == found[-1].size_bytes:
            found.pop()
        while len(found) > 1 and _gain(found[-2], option) >= _gain(found[-2], found[-1]):
            found.pop()
        found.append(option)
    return found


def _gain(small: Option, large: Option) -> float:
    """Return what a byte of the step reduces the cost by."""
    return (small.cost - large.cost) / (large.size_bytes - small.size_bytes)


def choose(matrices: Sequence[Sequence[Option]], budget_bytes: float) -> list[Option]:
    """Return an option for every matrix, in all at most budget_bytes unless the smallest are more.

    The same arguments give the same result on every machine.
    """
    hulls = [hull(options) for options in matrices]
    chosen = [options[0] for options in hulls]
    left = budget_bytes - sum(option.size_bytes for option in chosen)
    steps = sorted(
        (-_gain(small, large), number, step)
        for number, options in enumerate(hulls)
        for step, (small, large) in enumerate(pairwise(options))
    )
    ended = set[int]()  # matrices whose next step did not fit
    for _, number, step in steps:
        more = hulls[number][step + 1].size_bytes - hulls[number][step].size_bytes
        if number in ended or more > left:
            ended.add(number)
            continue
        chosen[number] = hulls[number][step + 1]
        left -= more
    return chosen
