"""Open the layers of a store with a device, and compute their experts on the CPU or on it.

One layer, in order of time:

    open      the device's policy receives the routing; kernels for resident experts are queued;
              the host's tier receives the rest (ids of the others become -1)
    compute   the host's tier hands over its experts, in the order they arrive:
                fetch    copied to device slots, in batches that fit, and computed there: the
                         device computes everything, so residency chooses nothing
                compute  computed on the CPU in its host slot, while the device computes its own
                auto     divided so that the later side ends soonest (miss_split.py). Experts of
                         many rows are always fetched: the CPU reads weights once and computes per
                         row. If every expert has a slot, all are fetched: none is fetched again
    result    the device's rows come down, and the K rows of a token are summed in a fixed order
    (after)   while the bus is idle, experts that the CPU computed and the policy would keep are
              promoted: copied into a device slot. The next layers do not wait for them. Where
              every expert has a slot, the experts in RAM follow without demand, pass by pass

The place of the dense weights decides what is copied:

    in RAM           x goes up once a layer, the device's rows come down and are summed on the CPU
    on the device    x comes down only for experts that the CPU computes, and their rows go up; the
    (`inside`)       sum is queued like everything else, and nothing waits for it. Routing, with it
                     a hint, and that x are read before anything is queued. A layer whose experts
                     all stay there does not even read its routing. Kernels find its experts
                     through a table of slots, and its routing is counted when the pass ends

When the device is out of memory, the tier continues with half its slots, all empty. The
computation is tried once more. A second failure in a layer is OutOfMemory.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeinf.errors import Unavailable
from moeinf.offload.gpu_tier.device_slots import DeviceTier
from moeinf.offload.gpu_tier.miss_split import FEW_ROWS, Miss, Split
from moeinf.offload.store.compute import MOST_ROWS
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.routed import Ids, Routed, cells_of
from moeinf.offload.store.tier import Experts, Hint, Opened

assert FEW_ROWS <= MOST_ROWS  # above MOST_ROWS, CPU and device differ in bits, and `auto` divides


class OutOfMemory(Unavailable, MemoryError):
    """The device has no memory for a computation, even with half the slots."""

    code = "no_workspace"
    hint = (
        "a smaller --ctx, --device cpu, more --device-memory, or the same command after you "
        "free device memory"
    )


class TierRunner:
    """Open layers, each a DeviceWork or a ByTable."""

    def __init__(self, host: HostTier, tier: DeviceTier, miss: Miss, share: float) -> None:
        """Set up the runner. share: the part of the misses that `auto` fetches."""
        self.host, self.tier, self._miss = host, tier, miss
        self._split = Split(share)

    def open(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, hint: tuple[int, Tensor] | None
    ) -> Opened | ByTable:
        """Open a layer. Raises DeviceError, OutOfMemory, ValueError for invalid ids."""
        tier, experts = self.tier, self.host.experts
        below = None
        there = x, weights
        if tier.inside:
            table = tier.slot_table(layer * experts, experts)
            if table is not None and tier.can_route(layer, len(x)):
                tier.count_at_end(ids)
                return ByTable(tier, layer, x, ids, weights, table)
            ids, weights, hint, below = self._read(x, ids, weights, hint)
        wanted = weights.numpy() if self._wants_weights else None
        routed = Routed.of(layer, ids.numpy(), experts, wanted)
        tier.policy.routed(layer, routed.ids, routed.weights)
        told = None if hint is None else self._pass_on(*hint)
        here = self._here(layer, routed.ids)
        taken, rest = routed.split(here) if here.any() else ([], routed)
        work = DeviceWork(self, *there, routed.places, below)
        if tier.inside and below is None and self._computes_below and rest.cells:
            work.read_x()
        if taken and work.on_device(taken):
            tier.count_hits(routed.events - rest.events)
            routed = rest
        return routed, told, work

    @property
    def _wants_weights(self) -> bool:
        return self.tier.policy.wants_weights or self.host.policy.wants_weights

    def _read(
        self, x: Tensor, ids: Tensor, weights: Tensor, hint: tuple[int, Tensor] | None
    ) -> tuple[Tensor, Tensor, tuple[int, Tensor] | None, Tensor | None]:
        """Read what the host needs of a layer's input on the device, in one wait.

        Returns ids, weights (unchanged where no policy wants them), the hint, and few rows of x if
        the CPU may compute with them.
        """
        asked = {"ids": ids}
        if self._wants_weights:
            asked["weights"] = weights
        if hint is not None:
            asked["hint"] = hint[1]
        if self._computes_below and len(x) <= FEW_ROWS:
            asked["x"] = x
        found = dict(zip(asked, self.tier.read(*asked.values()), strict=True))
        told = None if hint is None else (hint[0], found["hint"])
        return found["ids"], found.get("weights", weights), told, found.get("x")

    def divide(self, experts: Experts) -> tuple[Experts, Experts]:
        """Return the experts to fetch, and those that the CPU computes in place."""
        if self._miss == "compute":
            return [], experts
        if self._miss == "fetch" or self.tier.all_fit:  # then no fetched expert is evicted
            return experts, []
        fetched = [pair for pair in experts if len(pair[1]) > FEW_ROWS]
        few = [pair for pair in experts if len(pair[1]) <= FEW_ROWS]
        few.sort(key=lambda pair: not self.tier.policy.keeps(pair[0]))
        count = self._split.fetched(len(few), self.tier.on_their_way + len(fetched))
        return fetched + few[:count], few[count:]

    def promote(self, cells: list[int]) -> None:
        """Copy up the CPU's experts that the tier would keep, if the bus is idle."""
        if not cells or not self.tier.bus_is_idle:
            return
        there = (cell for cell in cells if self.host.table.is_resident(cell))
        worth = [cell for cell in there if self.tier.policy.keeps(cell)]
        if worth:
            self.tier.bring(worth)

    @property
    def _computes_below(self) -> bool:
        """True if the CPU may compute experts that are not on the device."""
        return self._miss != "fetch" and not (self._miss == "auto" and self.tier.all_fit)

    def _here(self, layer: int, ids: Ids) -> NDArray[np.bool_]:
        """Return which ids are on the device; places without an expert are unspecified."""
        return self.tier.resident(cells_of(layer, ids, self.host.experts)) & (ids >= 0)

    def _pass_on(self, layer: int, ids: Tensor) -> Hint:
        """Report a hint to the device's policy; return the hint for the host's policy.

        This comes before anything of the submitted layer is queued, so that nothing waits.
        """
        chosen = ids.numpy()
        self.tier.policy.hinted(layer, chosen)
        return layer, np.where(self._here(layer, chosen), chosen.dtype.type(-1), chosen)


class DeviceWork:
    """The rows of one layer: of experts on the device, and of experts in RAM."""

    def __init__(
        self,
        runner: TierRunner,
        x: Tensor,
        weights: Tensor,
        places: dict[int, list[int]],
        below_x: Tensor | None = None,
    ) -> None:
        """Set up x [T, D] and weights [T, K], on the device of `result`; places t·K + k by cell.

        below_x: x in RAM, if it was read already.
        """
        self._places = places
        self._runner, self._tier, self._host = runner, runner.tier, runner.host
        self._x, self._mix, self._top_k = x, weights, weights.shape[1]
        self._device_x: Tensor | None = None  # allocated on first use
        self._device_rows: Tensor | None = None
        self._device_places: list[int] = []  # of rows that the device computes
        self._below_x = below_x  # in RAM, for the CPU
        self._below_rows: Tensor | None = None
        self._below_places: list[int] = []  # inside: of the CPU's rows
        self._promotable: list[int] = []  # cells that the CPU has computed
        self._ring: list[int] = []  # prefill: cells of the last kernels, half of the slots
        self._shrunk = False

    def read_x(self) -> None:
        """Read x for the CPU (inside), before any kernel is queued that it would wait for."""
        (self._below_x,) = self._tier.device.download(self._x)

    def on_device(self, experts: Experts) -> bool:
        """Queue cells in device slots. False: the tier has just been emptied."""
        tier, device = self._tier, self._tier.device
        if not all(tier.is_resident(cell) for cell, _ in experts):
            return False
        try:
            rows = self._rows_there()
            assert self._device_x is not None
            tier.compute(self._device_x, experts, self._top_k, rows)
        except device.out_of_memory as error:
            if self._shrunk or not tier.shrink():
                words = f"no device memory is left, with {tier.slots} slots: {error}"
                raise OutOfMemory(words) from error
            self._shrunk = True
            return False
        self._device_places += [place for _, places in experts for place in places]
        if not tier.decoding:
            half = max(1, tier.slots // 2)
            self._ring = [*self._ring, *(cell for cell, _ in experts)][-half:]
        return True

    def compute(self, cells: Iterable[int]) -> None:
        """Fill the rows of cells in host slots, or queue them on the device by `result`.

        Fetched cells come in batches of at most half the device's slots. Batches of a prefill do
        not evict the batch before. So one batch is copied while kernels read the other, however
        many experts are requested. In decoding the policy chooses freely: kernels of one row end
        before the next copy.
        """
        tier = self._tier
        waiting, computed = self._runner.divide([(cell, self._places[cell]) for cell in cells])
        while waiting:
            most = max(1, tier.slots // 2)
            brought = tier.bring((cell for cell, _ in islice(waiting, most)), self._ring)
            assert brought, "a tier has at least one slot that nothing holds"
            if self.on_device(waiting[: len(brought)]):
                waiting = waiting[len(brought) :]
        if computed:
            self._compute_below(computed)
            self._promotable += [cell for cell, _ in computed]
            if tier.decoding:
                tier.stats.decode_cpu_events += sum(len(places) for _, places in computed)

    def result(self) -> Tensor:
        """Return [T, D], on the device of x."""
        tier = self._tier
        if tier.inside:
            rows = self._rows_there()
            if self._below_rows is not None:
                at = torch.tensor(self._below_places)
                rows.index_copy_(0, *tier.device.upload(at, self._below_rows[at]))
            out = tier.combine(rows.view(*self._mix.shape, -1), self._mix)
        else:
            rows = self._rows_below()
            if self._device_rows is not None and self._device_places:
                (found,) = tier.read(self._device_rows)
                places = torch.tensor(self._device_places)
                rows[places] = found[places]
            out = self._host.combine(rows.view(*self._mix.shape, -1), self._mix)
        self._runner.promote(self._promotable)
        return out

    def _rows_there(self) -> Tensor:
        """Return rows [T·K, D] on the device; inside, those of `result`, 0 where not computed."""
        if self._device_rows is None:
            count, inside = self._mix.numel(), self._tier.inside
            self._device_x = self._x if inside else self._tier.device.upload(self._x)[0]
            if inside:
                self._device_rows = self._x.new_zeros(count, self._x.shape[1])
            else:
                self._device_rows = self._tier.device.empty_rows(self._device_x, count)
        return self._device_rows

    def _rows_below(self) -> Tensor:
        """Return the rows [T·K, D] in RAM; inside, unspecified where the CPU computed nothing."""
        if self._below_rows is None:
            size = self._mix.numel(), self._x.shape[1]
            if self._tier.inside:
                self._below_rows = torch.empty(size, dtype=self._x.dtype)
            else:
                self._below_rows = self._x.new_zeros(size)
        return self._below_rows

    def _compute_below(self, experts: Experts) -> None:
        """Compute experts on the CPU, from the host's slots."""
        if self._tier.inside:
            self._below_places += [place for _, places in experts for place in places]
            if self._below_x is None:  # the tier has lost its slots since the layer was opened
                (self._below_x,) = self._tier.read(self._x)
        x = self._x if self._below_x is None else self._below_x
        self._host.compute(x, experts, self._top_k, self._rows_below())


class ByTable:
    """One submitted layer whose experts all stay on the device: its ids are not read here.

    While `table` is the same object, its result queues the same kernels and may be replayed without
    asking.
    """

    def __init__(
        self,
        tier: DeviceTier,
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        table: Tensor,
    ) -> None:
        self.table = table
        self._tier, self._layer, self._given = tier, layer, (x, ids, weights)

    def result(self) -> Tensor:
        """Queue the kernels: [T, D]; rows without an expert are 0."""
        x, ids, weights = self._given
        rows = x.new_zeros(*ids.shape, x.shape[1])
        self._tier.compute_routed(self._layer, x, ids, self.table, rows.view(-1, x.shape[1]))
        return self._tier.combine(rows, weights)
