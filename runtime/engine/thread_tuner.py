"""Choose how many threads decode, by the times of decode steps while the engine runs.

More threads are not always faster: a few saturate the memory, and a thread that another process
displaces delays every layer. A trial lets two counts take turns by step and compares their medians:

    step       … 16 | 1  2  3  4  …  12 | 128 steps | 1  2 …
    threads    8  8 | 4  8  4  8  …   8 | 4       4 | 2  4 …      4 was not slower: it stays

A fewer count stays if it is not slower, a greater one if it is `_GAIN` faster. Each trial that
changes nothing doubles the time to the next one. A trial ends at once when its count is far slower.
"""

from __future__ import annotations

import statistics

_FIRST, _EVERY, _MOST_EVERY = 16, 128, 4096  # steps before a trial
_TURNS = 6  # steps of each count in a trial
_SURE = 3  # steps of each count after which a trial can be ended
_GAIN = 0.97  # of the time, which more threads must reach
_FAR = 1.25  # times the time, which ends a trial


class ThreadTuner:
    """Chooses the number of threads of the next step from the measured times.

    Threads never change a result. So a wrong choice costs time only, until the next trial.
    """

    def __init__(self, most: int) -> None:
        """Start with `most` threads, which is never exceeded."""
        self._most = self.chosen = most
        self._other: int | None = None  # what the running trial compares with
        self._times: dict[int, list[float]] = {}
        self._down = True  # the direction of the next trial
        self._wait, self._every = _FIRST, _EVERY

    @property
    def threads(self) -> int:
        """The number of threads for the next step."""
        if self._other is None:
            return self.chosen
        counts = (self._other, self.chosen)
        return min(counts, key=lambda count: len(self._times[count]))

    def took(self, seconds: float) -> None:
        """Take the time of a step with `threads` that waited for no expert."""
        if self._other is None:
            self._wait -= 1
            if self._wait <= 0:
                self._begin()
            return
        self._times[self.threads].append(seconds)
        mine, others = self._times[self.chosen], self._times[self._other]
        if len(mine) < len(others) or len(mine) < _SURE:
            return
        ratio = statistics.median(others) / statistics.median(mine)
        if ratio > _FAR or len(mine) == _TURNS:
            self._end(ratio <= (1.0 if self._other < self.chosen else _GAIN))

    def _begin(self) -> None:
        fewer, more = max(1, self.chosen // 2), min(self._most, 2 * self.chosen)
        other = fewer if self._down else more
        self._down = not self._down
        if other == self.chosen:  # at an end: try the other direction
            other = fewer + more - self.chosen
        if other == self.chosen:
            self._wait = _MOST_EVERY  # one thread at most
            return
        self._other, self._times = other, {other: [], self.chosen: []}

    def _end(self, better: bool) -> None:
        assert self._other is not None
        if better:
            self._down = self._other < self.chosen  # go on in this direction
            self.chosen, self._every = self._other, _EVERY
        else:
            self._every = min(2 * self._every, _MOST_EVERY)
        self._other, self._wait = None, self._every
