"""Decide whether the requests that decode share a pass, by measured time.

From memory a pass of n rows costs little more than one of one row, so all share it. Where passes
wait for the disk, each row may need experts of its own. They displace those of the others, and n
requests can be slower together than one after the other. So the oldest decodes alone there, unless
a trial shows that all together take less time per token:

    passes    … 16 alone | 16 together | 64 of the faster way | 16 of the other | 128 …

Each trial that changes nothing doubles the passes to the next one. The results are the same.
"""

from __future__ import annotations

_BOUND = 0.05  # share of time spent waiting above which the disk decides
_MEMORY = 0.9  # of that share, and of the time per token
_FIRST, _EVERY, _MOST_EVERY = 16, 64, 1024  # passes before a trial
_TRIAL, _SETTLE = 16, 4  # passes of a trial; in the first ones the cache still changes
_GAIN = 0.97  # of the time per token, which the other way must reach
_FAR, _SURE = 1.25, 4  # times the time, after so many counted passes, ends a trial


class GroupGate:
    """The measured times of one scheduler."""

    def __init__(self) -> None:
        self.together = False  # the faster way while the disk decides
        self._waits = 0.0  # decayed share of the time
        self._seconds: dict[bool, float] = {}  # per token, by way
        self._trial: list[float] | None = None  # seconds per token of its passes
        self._left, self._every = _FIRST, _EVERY

    @property
    def bound(self) -> bool:
        """True while the disk decides how long a pass takes."""
        return self._waits > _BOUND

    def size(self, requests: int) -> int:
        """Return how many of the requests, the oldest first, share the next pass."""
        if not self.bound:
            return requests
        return requests if self.together != (self._trial is not None) else min(1, requests)

    def passed(self, rows: int, requests: int, seconds: float, waited: float) -> None:
        """Count a pass of `rows` of the requests; waited: the part without work to compute."""
        share = waited / seconds if seconds else 0.0
        self._waits = self._waits * _MEMORY + share * (1 - _MEMORY)
        if requests < 2 or not self.bound:
            self._trial = None
            return
        way, each = rows > 1, seconds / rows
        if self._trial is not None and way != self.together:
            self._trial.append(each)
            self._judge(self._trial[_SETTLE:])
            return
        known = self._seconds.get(way, each)
        self._seconds[way] = known * _MEMORY + each * (1 - _MEMORY)
        self._left -= 1
        if self._left <= 0 and way == self.together:
            self._trial = []

    def _judge(self, counted: list[float]) -> None:
        """End the trial when it has all its passes, or is far slower."""
        if len(counted) < _SURE:
            return
        ratio = sum(counted) / len(counted) / self._seconds[self.together]
        if ratio <= _FAR and len(counted) < _TRIAL - _SETTLE:
            return
        self._trial = None
        if ratio < _GAIN:
            self.together, self._every = not self.together, _EVERY
            self._seconds[self.together] = sum(counted) / len(counted)
        else:
            self._every = min(2 * self._every, _MOST_EVERY)
        self._left = self._every
