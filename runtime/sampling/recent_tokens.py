"""Count the tokens that penalties apply to, one step per token of the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class RecentTokens:
    """Counts of the tokens in the last `window` tokens of a history; -1: in the whole history.

    seen: bool [vocab]; counts: int32 [vocab]. If the history is the same object as before, it may
    only have grown. Then a call reads only its new tokens and those that left the window.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._history: Sequence[int] | None = None
        self._start = self._end = 0  # the counted range
        self.counts: NDArray[np.int32] = np.zeros(0, np.int32)
        self.seen: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def follow(self, history: Sequence[int], vocab: int) -> None:
        """Update the counts to the end of a history. Raises IndexError for ids beyond `vocab`."""
        end = len(history)
        start = 0 if self._window < 0 else max(0, end - self._window)
        same = history is self._history and vocab == len(self.counts)
        if not same or end < self._end or start > self._end:
            self._count(history, start, vocab)
        else:
            for token in history[self._end : end]:
                self.counts[token] += 1
                self.seen[token] = True
            for token in history[self._start : start]:
                self.counts[token] -= 1
                self.seen[token] = self.counts[token] > 0
        self._start, self._end = start, end

    def _count(self, history: Sequence[int], start: int, vocab: int) -> None:
        self._history = history
        self.counts = np.zeros(vocab, np.int32)
        np.add.at(self.counts, np.asarray(history[start:], np.intp), 1)
        self.seen = self.counts > 0
