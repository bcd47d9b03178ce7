"""Decide if prefetching can pay: only if the engine waits for reads.

Does not know experts, predictions or how a pass is timed.

A correct prefetch saves at most the wait for its read. A wrong one costs its bytes and a slot. All
prefetches together can save at most the share of decode time spent waiting. If the share is small,
they are not worth their bytes, even with good predictions. The share is computed from decayed sums,
so that short noise neither starts nor ends prefetching.
"""

from __future__ import annotations

_MEMORY = 0.95  # decay per token: some 20 tokens count


class Throttle:
    """Open while waiting takes at least `share` of decode time; open before the first pass."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._waited = self._seconds = 0.0

    @property
    def open(self) -> bool:
        return self._waited >= self._share * self._seconds

    def passed(self, waited: float, seconds: float) -> None:
        """Add a decode pass of `seconds`, of which `waited` were without work to compute."""
        self._waited = self._waited * _MEMORY + waited
        self._seconds = self._seconds * _MEMORY + seconds
