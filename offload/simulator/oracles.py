"""Policies that know a part of the future: they show what bounds a policy that has to guess it.

    Horizon     knows exactly when the next h decode tokens use each cell, and nothing more
    Histogram   knows how often the whole answer, or all answers of its task, use each cell

Unknown cells are ranked by decayed counts, as in LRFU. So Horizon with h = 0 is LRFU, and with all
tokens it is Belady for decode passes. Both are for the simulator, one request at a time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.base import Setup, Weights, chosen_cells
from moeinf.offload.policy.literature.lrfu import Lrfu
from moeinf.offload.routing.trace import Phase, Recording

_KNOWN = 1e12  # above all decayed counts
_FAINT = 1e-9  # decayed counts beside a histogram only break ties


class Horizon(Lrfu):
    """Evict a cell that the next `tokens` decode tokens do not use, or use last."""

    def __init__(self, setup: Setup, recording: Recording, tokens: float) -> None:
        super().__init__(setup)
        decoded = [done for done in recording.passes if done.phase == "decode"]
        coming: dict[int, deque[int]] = defaultdict(deque)  # per cell: the events that use it
        self._events: list[list[int]] = []  # per decoded layer: its cells
        for done in decoded:
            for layer, ids in enumerate(done.ids):
                cells = chosen_cells(layer, ids, setup.shape.experts)
                for cell in cells:
                    coming[cell].append(len(self._events))
                if cells:
                    self._events.append(cells)
        self._coming = coming
        self._ahead = int(min(tokens * setup.shape.layers, len(self._events)))
        self._event = 0  # the next one
        self._counts = self.keys.copy()  # the keys of LRFU
        self._decoding = False
        for cells in self._events[: self._ahead]:
            self._rank(cells)

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._decoding = phase == "decode"

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        now, self.keys = self.keys, self._counts
        super().routed(layer, ids)
        self.keys = now
        cells = chosen_cells(layer, ids, self.setup.shape.experts)
        if self._decoding:
            for cell in cells:
                self._coming[cell].popleft()
            self._event += 1
            seen = self._event + self._ahead
            self._rank(chain.from_iterable(self._events[seen - 1 : seen]))
        self._rank(cells)

    def _rank(self, cells: Iterable[int]) -> None:
        for cell in cells:
            uses = self._coming[cell]
            known = uses and uses[0] < self._event + self._ahead
            self.keys[cell] = _KNOWN - uses[0] if known else self._counts[cell]


class Histogram(Lrfu):
    """Evict the cell that the request's answer, or its task's answers, use least.

    by_task: sum the answers of the requests with the same label, up to a colon in it.
    """

    def __init__(self, setup: Setup, recording: Recording, by_task: bool) -> None:
        super().__init__(setup)
        tasks = dict[str, NDArray[np.float64]]()
        self._task: dict[int, str] = {}
        for request, eam in recording.request_eams().items():
            label = recording.labels.get(request, "").split(":")[0]
            task = self._task[request] = label if by_task else str(request)
            tasks[task] = tasks.get(task, 0) + eam.decode.ravel().astype(float)
        self._shares = {task: use / max(1.0, use.sum()) for task, use in tasks.items()}
        self._counts = self.keys.copy()
        self._share = np.zeros(setup.cells)

    def begin_pass(self, rows: NDArray[np.int64], phase: Phase) -> None:
        self._share = self._shares[self._task[int(rows[0])]]
        self.keys = self._share + _FAINT * self._counts

    def routed(
        self, layer: int, ids: NDArray[np.integer[Any]], weights: Weights | None = None
    ) -> None:
        now, self.keys = self.keys, self._counts
        super().routed(layer, ids)
        self.keys = now
        cells = chosen_cells(layer, ids, self.setup.shape.experts)
        self.keys[cells] = self._share[cells] + _FAINT * self._counts[cells]
