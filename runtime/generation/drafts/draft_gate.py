"""Decide how many drafted tokens are worth checking in the next decode pass, by measured time.

A pass of k drafted tokens has k + 1 rows. It gives 1 + E(k) tokens, where E(k) is the sum of the
chances that the first 1 … k are right. It costs cost(k + 1) passes of one row. The k with the
largest

    value(k) = (1 + E(k)) / (cost(k + 1) + k · time of drafting a token)

is taken if its value is above 1 by a margin. The time of one row is a decayed mean. The cost of
more rows is also a decayed mean. While it is not used it moves slowly back to a first guess, so it
is tried again. The number of rows is at most twice the largest that was measured.

Losses are bounded. Lost time is counted in tokens of one row. It is paid from what the request has
gained, and then from an allowance of all requests, which grows by _ALLOWED per pass. Below 0
nothing is drafted. Nothing is drafted while passes wait for the disk either, because more rows need
more experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROWS = (2, 3, 4, 6, 8, 12, 16)  # of a pass with drafts
_FIRST = 0.4  # cost of a further row before the first is measured
_MARGIN = 1.05
_MEMORY = 0.9  # of the time of one row, and of the share of waits
_NEW = 0.3  # part of a new cost
_FADE = 0.005  # per pass: a cost moves back to the first guess
_OUTLIER = 2.0  # a longer time of one row counts as this many times the mean
_STALLED = 0.05  # share of time spent waiting above which nothing is drafted
_ALLOWED, _MOST_ALLOWED, _START = 0.01, 2.0, 1.0  # tokens of one row


@dataclass
class DraftStats:
    """One request's drafts: tokens gained, in tokens of one row, and counts."""

    gained: float = 0.0
    drafted: int = 0
    accepted: int = 0


class DraftGate:
    """The measured costs of one engine."""

    def __init__(self) -> None:
        self._single = 0.0  # seconds of a pass of one row; 0: not measured
        self._costs: dict[int, float] = {}  # by rows, in passes of one row
        self._stalled = 0.0
        self._allowance = _START

    def passed(self, seconds: float, waited: float) -> None:
        """Count a pass of one row; waited: the part of it without work to compute."""
        mean = self._single
        shown = min(seconds, mean * _OUTLIER) if mean else seconds
        self._single = mean * _MEMORY + shown * (1 - _MEMORY) if mean else seconds
        for rows, cost in self._costs.items():
            self._costs[rows] = cost + _FADE * (_guess(rows) - cost)
        self._wait(seconds, waited)

    def checked(
        self,
        stats: DraftStats,
        drafted: int,
        kept: int,
        seconds: float,
        waited: float,
        drafting: float = 0.0,
    ) -> None:
        """Count a pass with drafts that gave `kept` tokens. drafting: seconds before it."""
        rows = drafted + 1
        cost = min(seconds / self._single, float(rows))  # more is noise
        before = self.cost(rows)
        self._costs[rows] = before + _NEW * (cost - before)
        stats.drafted += drafted
        stats.accepted += kept - 1
        self._pay(stats, kept - cost - drafting / self._single)
        self._wait(seconds, waited)

    def lost(self, stats: DraftStats, drafting: float) -> None:
        """Count the seconds of a draft that was not worth a pass."""
        self._pay(stats, -drafting / self._single)

    def _pay(self, stats: DraftStats, gained: float) -> None:
        stats.gained += gained
        if stats.gained < 0:
            self._allowance += stats.gained
            stats.gained = 0.0

    def worth(self, stats: DraftStats, chances: Sequence[float], each: float = 0.0) -> int:
        """Return how many tokens to draft, at most len(chances); see AcceptanceByMatch.chances.

        each: seconds to draft one.
        """
        if not self._single or self._stalled > _STALLED:
            return 0
        if stats.gained + self._allowance <= 0:
            return 0
        best, found, expected, rows = _MARGIN, 0, 1.0, 1
        most = min(len(chances) + 1, 2 * max(self._costs, default=1))
        for wanted in ROWS:
            if wanted > most:
                break
            expected += sum(chances[rows - 1 : wanted - 1])
            rows = wanted
            value = expected / (self.cost(rows) + (rows - 1) * each / self._single)
            if value > best:
                best, found = value, rows - 1
        return found

    def value(self, chances: Sequence[float], each: float) -> float:
        """Return the tokens of a pass that checks a whole draft, in those of its time."""
        rows = len(chances) + 1
        return (1 + sum(chances)) / (1 + len(chances) * self.row_cost(rows, each))

    def row_cost(self, rows: int, each: float) -> float:
        """Return the mean cost of a drafted token in a pass of `rows`, which is at least 2."""
        return (self.cost(rows) - 1) / (rows - 1) + each / self._single

    @property
    def single(self) -> float:
        """The seconds of a pass of one row; 0: not measured."""
        return self._single

    def cost(self, rows: int) -> float:
        """Return the cost of a pass in passes of one row, from the nearest smaller one measured."""
        if rows in self._costs:
            return self._costs[rows]
        smaller = [known for known in self._costs if known < rows]
        known = max(smaller) if smaller else min(self._costs, default=0)
        if not known:
            return _guess(rows)
        return 1 + (self._costs[known] - 1) * (rows - 1) / (known - 1)

    def _wait(self, seconds: float, waited: float) -> None:
        share = waited / seconds if seconds else 0.0
        self._stalled = self._stalled * _MEMORY + share * (1 - _MEMORY)
        self._allowance = min(self._allowance + _ALLOWED, _MOST_ALLOWED)


def _guess(rows: int) -> float:
    return 1 + _FIRST * (rows - 1)
