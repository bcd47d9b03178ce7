"""Computes the experts of one layer on the CPU or on the device, wherever each is best computed.

Does not know routing, nor who asks. The host store hands over what lies in its slots, as it
arrives; what lies in device slots is queued before that. What becomes of a miss of the device is
said in tiered_store.py.

Where the dense weights lie decides what travels:

    in RAM           x goes up once a layer, the device's rows come down and are summed on the CPU
    on the device    x comes down only for experts that the CPU computes, and their rows go up; the
                     sum is queued like everything else, and nobody waits for it

No memory for a computation on the device: the tier goes on with half its slots, all empty, and the
computation is tried once more; a second failure in a layer is OutOfMemory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from moeinf.errors import Unavailable
from moeinf.offload.gpu_tier.device_slots import DeviceTier
from moeinf.offload.gpu_tier.miss_split import FEW_ROWS, Miss, Split
from moeinf.offload.store.compute import MOST_ROWS, SlotMath
from moeinf.offload.store.residency import Residency

assert FEW_ROWS <= MOST_ROWS  # of more the CPU and the device have other bits, and `auto` divides


class OutOfMemory(Unavailable, MemoryError):
    """The device has no memory for a computation, even with half the slots."""

    code = "no_workspace"
    hint = (
        "a smaller --ctx, --device cpu, or the same again after you free some of the device; "
        "more --device-memory helps where the device has it free"
    )


class TierRunner:
    """Computes what the host store hands over: on the CPU, or on the device after a copy.

    Holds what of the open layer lies on the device.
    """

    def __init__(
        self,
        tier: DeviceTier,
        cpu: SlotMath,
        host: Residency,
        miss: Miss,
        share: float,
        inside: bool = False,
    ) -> None:
        """share: of the misses that `auto` fetches. inside: whether dense weights are on the
        device: then x is there, and so is what `combine` gives."""
        self._tier, self._cpu, self._host, self._miss = tier, cpu, host, miss
        self._split, self._inside = Split(share), inside
        self._x: Tensor | None = None  # on the device, once anything needs it
        self._rows: Tensor | None = None
        self._places: list[int] = []  # of rows that the device computes
        self._below_x: Tensor | None = None  # inside: x in RAM, for the CPU
        self._below_rows: Tensor | None = None  # inside: what the CPU has made of it
        self._computed: list[int] = []  # inside: places of the CPU's rows
        self._promotable: list[int] = []  # cells that the CPU has computed
        self._ring: list[int] = []  # cells of the last kernels, half of the slots; of a prefill
        self._shrunk = False  # in this layer

    @property
    def computes_below(self) -> bool:
        """Whether the CPU may compute some of what is not on the device."""
        return self._miss != "fetch" and not (self._miss == "auto" and self._tier.all_fit)

    def begin(self, x: Tensor | None = None) -> None:
        """A layer is submitted; what an error has left of the last is forgotten. x: inside, in
        RAM, for the CPU: read before anything is queued, or the CPU would wait for all of it."""
        self._x = self._rows = self._below_rows = None
        self._below_x = x
        self._places, self._computed, self._promotable, self._shrunk = [], [], [], False
        self._ring = []

    def rows(self, x: Tensor, count: int) -> Tensor:
        """The layer's rows, zeros where nothing is computed: where x is."""
        if not self._inside:
            return self._cpu.rows(x, count)
        if self._rows is None:
            self._x, self._rows = x, self._cpu.rows(x, count)
        return self._rows

    def on_device(self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int) -> bool:
        """Queues (cell, places) of cells in device slots. False: the tier has just been emptied."""
        device = self._tier.device
        if not all(self._tier.is_resident(cell) for cell, _ in experts):
            return False
        try:
            if self._inside:
                self.rows(x, len(x) * top_k)
            elif self._rows is None:
                self._x = device.upload(x)
                self._rows = device.empty_rows(self._x, len(x) * top_k)
            assert self._x is not None
            assert self._rows is not None
            self._tier.compute(self._x, experts, top_k, self._rows)
        except device.out_of_memory as error:
            if self._shrunk or not self._tier.shrink():
                words = f"no device memory is left, with {self._tier.slots} slots: {error}"
                raise OutOfMemory(words) from error
            self._shrunk = True
            return False
        self._places += [place for _, places in experts for place in places]
        if not self._tier.decoding:
            half = max(1, self._tier.slots // 2)
            self._ring = [*self._ring, *(cell for cell, _ in experts)][-half:]
        return True

    def run(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        """Fills the rows of some experts in host slots, or has the device do it by `combine`.

        What is fetched comes in batches of half the device's slots at most, and a prefill's do not
        push out those before, so that one is copied while kernels read the other, however many
        experts are asked for. (In decoding the policy has its will: kernels of one row are over
        before the next copy.)
        """
        fetched, computed = self._divide(experts)
        waiting = [(self._host.cell_in(slot), places) for slot, places in fetched]
        while waiting:
            most = max(1, self._tier.slots // 2)
            brought = self._tier.bring((cell for cell, _ in islice(waiting, most)), self._ring)
            assert brought, "a tier has at least one slot that nobody holds"
            first = waiting[: len(brought)]
            if self.on_device(x, first, top_k):
                waiting = waiting[len(brought) :]
        if computed:
            self._compute(x, computed, top_k, rows)
            self._promotable += [self._host.cell_in(slot) for slot, _ in computed]
            if self._tier.decoding:
                self._tier.stats.decode_cpu_events += sum(len(places) for _, places in computed)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows [T, K, D] and weights [T, K] -> [T, D], where x is."""
        flat = rows.view(-1, rows.shape[-1])
        if self._inside:
            if self._below_rows is not None:
                places, upload = torch.tensor(self._computed), self._tier.device.upload
                flat.index_copy_(0, upload(places), upload(self._below_rows[places]))
            out = self._tier.combine(rows, weights)
        else:
            if self._rows is not None and self._places:
                places, found = torch.tensor(self._places), self._tier.read(self._rows)
                flat[places] = found[places]
            out = self._cpu.combine(rows, weights)
        self._promote()
        self.begin()
        return out

    def end_copies(self) -> bool:
        return self._tier.end_copies()

    def _compute(
        self, x: Tensor, experts: Sequence[tuple[int, list[int]]], top_k: int, rows: Tensor
    ) -> None:
        """On the CPU, where the host's slots are."""
        if self._inside:
            if self._below_x is None:  # the tier has lost its slots since the layer was submitted
                self._below_x = self._tier.read(x)
            if self._below_rows is None:
                self._below_rows = torch.empty(rows.shape, dtype=rows.dtype)
            x, rows = self._below_x, self._below_rows
            self._computed += [place for _, places in experts for place in places]
        self._cpu.run(x, experts, top_k, rows)

    def _divide(
        self, experts: Sequence[tuple[int, list[int]]]
    ) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
        """What is fetched, and what is computed in place."""
        if self._miss == "compute":
            return [], list(experts)
        if self._miss == "fetch" or self._tier.all_fit:  # what is fetched then stays for good
            return list(experts), []
        fetched = [pair for pair in experts if len(pair[1]) > FEW_ROWS]
        few = [pair for pair in experts if len(pair[1]) <= FEW_ROWS]
        few.sort(key=lambda pair: not self._tier.policy.keeps(self._host.cell_in(pair[0])))
        count = self._split.fetched(len(few), self._tier.on_their_way + len(fetched))
        return fetched + few[:count], few[count:]

    def _promote(self) -> None:
        if not self._promotable or not self._tier.bus_is_idle:
            return
        there = (cell for cell in self._promotable if self._host.is_resident(cell))
        worth = [cell for cell in there if self._tier.policy.keeps(cell)]
        if worth:
            self._tier.bring(worth)
