"""Draft the continuation of a text: what followed its last tokens earlier in it.

    … the cat sat on the mat . Then the cat sat on ▸ the mat .
          └── the longest, then latest ──┘     the draft ┘

Source: prompt lookup decoding (Saxena 2023). Each chosen token also shows, without a pass,
whether the draft would have been right. `AcceptanceByMatch` keeps these outcomes by the length of
the match.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

LEAST = 2  # tokens of a match
_MOST = 32  # tokens of a match that are counted
_LENGTHS = (2, 3, 4, 6, 9, 14, 22)  # the first match length of each class
_RIGHT, _ALL = 1.0, 2.0  # of each class, before the first outcome
_MEMORY = 0.98  # decay per outcome of a class: some 50 count


class AcceptanceByMatch:
    """Shares of drafted tokens that were right, by the length of the match before them."""

    def __init__(self) -> None:
        self._right = [_RIGHT] * len(_LENGTHS)
        self._all = [_ALL] * len(_LENGTHS)

    def add(self, matched: int, right: bool) -> None:
        """Count the outcome of one drafted token after `matched` tokens that agreed."""
        at = bisect_right(_LENGTHS, matched) - 1
        self._right[at] = self._right[at] * _MEMORY + right
        self._all[at] = self._all[at] * _MEMORY + 1

    def chances(self, matched: int, most: int) -> list[float]:
        """Return the probability that the first 1 … most drafted tokens are all right."""
        found, chance = list[float](), 1.0
        for length in range(matched, matched + most):
            at = bisect_right(_LENGTHS, length) - 1
            chance *= self._right[at] / self._all[at]
            found.append(chance)
        return found


class Lookup:
    """The drafts of one text. It reads each new token once."""

    def __init__(self, capacity: int) -> None:
        """Make room for `capacity` tokens."""
        self._tokens = np.empty(capacity, np.int32)
        self._length = 0
        self._next = 0  # the place of the token that is drafted first
        self.matched = 0  # tokens before it that equal the last ones; 0: nothing is drafted
        self.acceptance = AcceptanceByMatch()

    def follow(self, history: Sequence[int]) -> None:
        """Read the new tokens of a history that only grows."""
        if not self._length:  # a prompt is no outcome
            self._length = len(history)
            self._tokens[: self._length] = history
            self._find()
            return
        for token in history[self._length :]:
            right = self.matched > 0 and int(self._tokens[self._next]) == token
            if self.matched:
                self.acceptance.add(self.matched, right)
            self._tokens[self._length] = token
            self._length += 1
            if right:
                self._next += 1
                self.matched = min(self.matched + 1, _MOST)
            else:
                self._find()

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens; a text that repeats is continued by the draft itself."""
        if not self.matched:
            return []
        found: list[int] = self._tokens[self._next : self._next + most].tolist()
        found = found[: self._length - self._next]
        while len(found) < most:
            found.append(found[len(found) - (self._length - self._next)])
        return found

    def _find(self) -> None:
        """Find the longest earlier occurrence of the last tokens, the latest of equal ones."""
        tokens, last = self._tokens, self._length - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        self.matched, latest = 0, 0
        for length in range(1, _MOST + 1):
            if not len(ends):
                break
            if length >= LEAST:
                self.matched, latest = length, int(ends[-1])
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[last - length]]
        self._next = latest + 1
