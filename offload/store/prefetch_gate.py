"""Whether reading ahead can pay: only where the engine waits for reads at all.

Does not know experts, predictions or how a pass is timed.

A right read ahead saves at most the wait for it; a wrong one costs its bytes, and a slot. What all
of them together can save is the share of decode time spent waiting: where it is small, they are not
worth their bytes, however good the predictions. The share is one of decayed sums, so that a
moment's noise neither starts nor ends reading ahead.
"""

from __future__ import annotations

_MEMORY = 0.95  # per token: some 20 are remembered


class Throttle:
    """Open while waiting takes at least `share` of decode time; open before anything is known."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._waited = self._seconds = 0.0

    @property
    def open(self) -> bool:
        return self._waited >= self._share * self._seconds

    def passed(self, waited: float, seconds: float) -> None:
        """A decode pass took `seconds`, of which `waited` with nothing left to compute."""
        self._waited = self._waited * _MEMORY + waited
        self._seconds = self._seconds * _MEMORY + seconds
