"""One submitted layer of the expert store, from its misses to its result."""

from __future__ import annotations

from collections import deque
from typing import Protocol, cast

from torch import Tensor

from moeinf.offload.store.host_tier import CpuWork, HostTier
from moeinf.offload.store.lossy.low_copies import LowCopies
from moeinf.offload.store.tier import Upper, Work


class Owner(Protocol):
    """The store that opened the layer."""

    @property
    def host(self) -> HostTier: ...

    @property
    def above(self) -> tuple[Upper, ...]: ...

    @property
    def low(self) -> LowCopies | None: ...

    def prefetch(self, layer: int) -> None: ...

    def ended(self) -> None: ...


class LayerRun:
    """One submitted layer: the experts still to compute, to read, and to request."""

    def __init__(
        self, store: Owner, layer: int, work: Work, hits: list[int], misses: deque[int]
    ) -> None:
        self._store, self._host, self._low = store, store.host, store.low
        self._layer, self._work = layer, work
        self._ready = deque(hits)  # resident and pinned
        self._unasked = misses  # without a slot
        self._misses, self._stalled = len(misses), self._host.stats.stall_seconds

    def ask(self) -> None:
        """Give slots to the first misses, while there are slots, and queue their reads.

        The policy's prefetches follow once every miss has a slot.
        """
        begin = self._host.clock()
        for _ in self._host.bring(self._unasked):
            self._unasked.popleft()
        if not self._unasked:
            self._store.prefetch(self._layer)
        self._host.decided(begin)

    def result(self) -> Tensor:
        """Return [T, D]. Raises ExpertReadError, after which the store is idle again."""
        try:
            ready, coming = self._ready, self._host.coming
            while ready or self._unasked or coming:
                if not ready:
                    if coming:
                        self._compute([self._host.arrive()])
                    elif not any(tier.end_copies() for tier in self._store.above):
                        # prefetches hold all slots
                        self._host.wait_for_slot(self._unasked[0])
                else:  # while a miss has no slot, one by one: each finished expert frees one
                    most = 1 if self._unasked else self._host.most_in_a_call or len(ready)
                    self._compute([ready.popleft() for _ in range(min(most, len(ready)))])
                if self._unasked:
                    self.ask()
            if self._low is not None:
                self._low.compute(cast(CpuWork, self._work))
        except BaseException:
            self.abandon()
            raise
        if self._host.decoding:
            self._host.judge.layer(self._misses, self._host.stats.stall_seconds - self._stalled)
        self._store.ended()
        return self._work.result()

    def _compute(self, cells: list[int]) -> None:
        """Compute pinned resident experts on their rows, then unpin them, also after an error."""
        try:
            self._work.compute(cells)
        finally:
            for cell in cells:
                self._host.table.unpin(cell)
        if self._host.pieces and not self._unasked:  # there may be slots for the next layer's now
            self._store.prefetch(self._layer)

    def abandon(self) -> None:
        """Free pins and slots, after the reads into the slots have ended."""
        self._host.abandon()
        if self._low is not None:
            self._low.abandon()
        while self._ready:
            self._host.table.unpin(self._ready.popleft())
        self._unasked.clear()
        self._store.ended()
