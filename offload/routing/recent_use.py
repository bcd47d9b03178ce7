"""Remember which experts the last passes of a store used, for those who watch it.

The engine's thread adds passes and never waits for a reader. Any other thread may read: what a pass
used is worked out there, once, and only while something reads. Ids on a device are copied down only
then, too: without a reader they cost nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEPT = 64  # passes
HALF_LIFE = 16  # passes, after which a use counts half
LEVELS = 15  # the heat of the hottest expert
_READ_FOR_S = 2.0  # after a read, in which ids on a device are copied down
_FEW = 1 << 14  # ids of a pass that are kept as they are; of more only which occur


class PassUse:
    """The experts that one pass used. number: of the pass, from 1. ended: time.monotonic()."""

    __slots__ = ("_ids", "ended", "number", "used")

    def __init__(
        self, number: int, ids: tuple[NDArray[np.int64], list[int], list[int]] | None
    ) -> None:
        """ids: all ids [rows of all layers, K]; of each layer its first cell, and its rows."""
        self.number, self.ended = number, time.monotonic()
        self._ids = ids
        self.used = np.empty(0, np.intp)

    def cells(self) -> NDArray[np.intp]:
        """Return the cells (layer · E + expert) that the pass used, ascending and distinct."""
        given = self._ids
        if given is not None:
            ids, firsts, rows = given
            cells = ids + np.repeat(np.array(firsts, np.intp), rows)[:, None]
            self.used = np.unique(cells[ids >= 0])
            self._ids = None  # last: a second thread does the same work meanwhile
        return self.used


class RecentUse:
    """The last KEPT passes of one store that ended well, drafted rows included."""

    def __init__(self, experts: int) -> None:
        """experts: of one layer."""
        self._experts = experts
        self._passes: deque[PassUse] = deque(maxlen=KEPT)
        self._routed: list[tuple[int, Tensor]] = []
        self._read_at = float("-inf")  # time.monotonic()
        self.number = 0  # of the last pass

    def begin(self) -> None:
        """Start a pass."""
        self._routed = []

    def add(self, layer: int, ids: Tensor) -> None:
        """Note ids [T, K] of a layer, -1: no expert. They are read when the pass ends."""
        self._routed.append((layer, ids))

    def end(self) -> None:
        """End the pass."""
        routed, self._routed = self._routed, []
        if not routed:
            return
        on_device = routed[0][1].device.type != "cpu"
        if on_device and time.monotonic() - self._read_at > _READ_FOR_S:
            return
        parts = [ids for _, ids in routed]
        ids = torch.cat(parts).numpy(force=True)  # a copy: layers may write to theirs again
        firsts = [layer * self._experts for layer, _ in routed]
        rows = [len(part) for part in parts]
        done = PassUse(self.number + 1, (ids, firsts, rows))
        if ids.size > _FEW:
            done.cells()
        self._passes.append(done)
        self.number = done.number

    def passes(self) -> list[PassUse]:
        """Return the last passes, the newest last. Any thread may call this."""
        self._read_at = time.monotonic()
        while True:
            try:
                return list(self._passes)
            except RuntimeError:  # a pass has ended meanwhile
                continue


def heat_of(passes: Sequence[PassUse], cells: int) -> NDArray[np.uint8]:
    """Return the heat of every cell, 0 … LEVELS.

    Each pass that used the expert counts 0.5^(age / HALF_LIFE), age in passes. The hottest expert
    has LEVELS, the others in proportion, rounded up: 0 means that none of the passes used it.
    """
    total = np.zeros(cells)
    for one in passes:
        total[one.cells()] += 0.5 ** ((passes[-1].number - one.number) / HALF_LIFE)
    most = total.max(initial=0.0)
    if not most:
        return np.zeros(cells, np.uint8)
    heat: NDArray[np.uint8] = np.ceil(total * (LEVELS / most) - 1e-9).astype(np.uint8)
    return heat
