"""Compute light absent experts with copies in fewer bits: a lossy choice, off by default.

It changes results, so it is off unless the user turns it on. The rule is HOBBIT's (2411.01433,
token-level dynamic loading): an expert counts by the weights of those that rank above it.

The copies have slots of their own, beside the host tier's. The copies used last stay there. A copy
never enters a slot of the tier, and policies do not learn of it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from moeinf.native import SlotPool
from moeinf.offload.format.layout import ExpertLayout
from moeinf.offload.store.compute import SlotMath, TorchFfn
from moeinf.offload.store.host_tier import CpuWork, HostTier
from moeinf.offload.store.routed import Routed
from moeinf.offload.store.transfer import ExpertReadError, Transfer

_Asked = tuple[int, int | None]  # a cell, and the ticket of its read; None: it is in its slot


def light(weights: Tensor, above: float) -> Tensor:
    """Return which experts are light, [T, K]: those above them have more than a share of the row.

    w: the weights of a row, largest first, and Σ w = 1. Number k is light if w_1 + … + w_(k-1) >
    above. So the first never is. weights: [T, K]; 0 where there is no expert.
    """
    order = weights.argsort(dim=1, descending=True, stable=True)
    ranked = weights.gather(1, order).double()
    before = ranked.cumsum(1) - ranked
    is_light = before > above * ranked.sum(1, keepdim=True)
    is_light[:, 0] = False
    return torch.zeros_like(is_light).scatter_(1, order, is_light)


class LowCopies:
    """The copies of all experts, and slots for those used last.

    Cells are those of the host tier. Only the engine's thread uses it.
    """

    def __init__(
        self,
        host: HostTier,
        layouts: Sequence[ExpertLayout],
        pool: SlotPool,
        transfer: Transfer,
        math: TorchFfn,
        above: float,
    ) -> None:
        """Set up. transfer: reads copies into `pool`; closed by `close`.

        layouts: of the copies, by cell. above: see `light`.
        """
        self._host, self._transfer, self._above, self._pool = host, transfer, above, pool
        distinct = {layout: SlotMath(layout, pool, math) for layout in dict.fromkeys(layouts)}
        self._math = [distinct[layout] for layout in layouts]  # by cell
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # the cell used last is the last
        self._free = list(range(pool.slots))
        self._asked: list[_Asked] = []  # of the open layer

    @property
    def cells(self) -> list[int]:
        """The cells whose copies are in slots, that used last at the end."""
        return list(self._slot_of)

    def take(self, routed: Routed, weights: Tensor, misses: deque[int]) -> None:
        """Take from `misses` the cells to compute with copies, and request those not in slots.

        A cell is taken if it is light in all its rows, and no read of the expert itself is in
        flight. Where slots are too few, the rest stays in `misses`.
        """
        ids = torch.from_numpy(routed.ids)
        held = torch.where(ids >= 0, weights, torch.zeros_like(weights))
        is_light = light(held, self._above).flatten().tolist()
        loading = self._host.table.has_slot
        taken = [
            cell
            for cell in misses
            if all(is_light[place] for place in routed.places[cell]) and not loading(cell)
        ]
        for cell in [cell for cell in taken if cell in self._slot_of]:
            self._slot_of.move_to_end(cell)
            self._asked.append((cell, None))
        absent = [cell for cell in taken if cell not in self._slot_of]
        slots = self._slots(len(absent))
        absent = absent[: len(slots)]
        for cell, slot in zip(absent, slots, strict=True):
            self._slot_of[cell] = slot
        try:
            self._asked += zip(absent, self._transfer.demand(absent, slots), strict=True)
        except BaseException:
            for cell in absent:
                self._forget(cell)
            raise
        for cell, _ in self._asked:
            misses.remove(cell)

    def compute(self, work: CpuWork) -> None:
        """Compute what `take` took, into the rows of `work`. Raises ExpertReadError."""
        experts, stats = list[tuple[int, int]](), self._host.stats
        while self._asked:
            cell, ticket = self._asked[0]
            if ticket is not None:
                start = time.perf_counter()
                try:
                    self._transfer.wait(ticket, cell)
                except ExpertReadError:
                    self._asked.pop(0)
                    self._forget(cell)
                    raise
                size, waited = self._transfer.bytes_of(cell), time.perf_counter() - start
                stats.bytes_read += size
                stats.decode_bytes_read += size
                stats.stall_seconds += waited
                stats.decode_stall_seconds += waited
                stats.low_reads += 1
                stats.low_bytes_read += size
                stats.low_bytes_spared += self._host.layouts[cell].data_bytes - size
            self._asked.pop(0)
            experts.append((cell, self._slot_of[cell]))
        if experts:
            math = self._math[experts[0][0]]
            stats.decode_events_low += work.compute_in(math, experts)

    def abandon(self) -> None:
        """Give up what `take` took, after an error has ended the layer."""
        while self._asked:
            cell, ticket = self._asked.pop()
            if ticket is not None:
                try:
                    self._transfer.abandon(ticket)
                finally:
                    self._forget(cell)

    def close(self) -> None:
        """End the readers, and free the slots, which must not be used afterwards."""
        self._transfer.close()
        self._pool.release_all()

    def _forget(self, cell: int) -> None:
        self._free.append(self._slot_of.pop(cell))

    def _slots(self, count: int) -> list[int]:
        """Return up to this many slots that nothing uses: free ones, then of copies used first."""
        found = [slot for slot in self._free if not self._transfer.may_write(slot)][:count]
        self._free = [slot for slot in self._free if slot not in found]
        busy = {cell for cell, _ in self._asked}
        for cell in [cell for cell in self._slot_of if cell not in busy][: count - len(found)]:
            found.append(self._slot_of.pop(cell))
        return found
