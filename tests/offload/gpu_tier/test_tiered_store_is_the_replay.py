"""The tiered store and its replay, event for event: what is simulated is what runs with a device.

The store is the real one. A fake libcuda carries out all work at once, and reads end when they are
asked for. A replay whose bus and link take no time must then count the same events. These are
device hits, host hits, experts computed on the CPU, copies over the bus and reads from the disk.
The other extreme is a bus that ends a copy only when it is waited for. Such a bus is hardly ever
idle, and copies pin host slots for long. Only the arithmetic is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest
import torch

from moeinf.native import DeviceContext, DeviceSlots, Driver, HostLock, SlotPool
from moeinf.offload.gpu_tier.device_slots import DeviceTier
from moeinf.offload.gpu_tier.layer_runner import TierRunner
from moeinf.offload.gpu_tier.miss_split import FEW_ROWS, MISSES, Miss
from moeinf.offload.gpu_tier.page_lock import PageLocking
from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.hint_model import HintSource, ModelledHints
from moeinf.offload.routing.route_csv import read_route_csv
from moeinf.offload.routing.trace import PassBuilder, Recording, RoutingShape, Tracer
from moeinf.offload.simulator.clock import DeviceSpeeds, TimeModel
from moeinf.offload.simulator.replay import Conditions
from moeinf.offload.simulator.simulated_device import Above
from moeinf.offload.simulator.tiered_replay import TieredReplay
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.stats import StoreStats
from tests.fake_device import FakeDevice
from tests.fakes import AtOnce, NoMath
from tests.native.fake_cuda import Fake
from tests.offload.store.test_store_is_the_replay import LAYOUT, TRACE

SHAPE = RoutingShape(layers=4, experts=16, top_k=2, expert_bytes=1, dense_bytes=4)
AT_ONCE, LATE = DeviceSpeeds(bus_bytes_per_s=inf), DeviceSpeeds(bus_bytes_per_s=1e-30)


@dataclass(frozen=True)
class Tiers:
    """One case: who decides, slots, what becomes of misses, and whether anything is read ahead."""

    policy: str
    device_slots: int
    host_slots: int
    miss: Miss
    share: float = 0.4
    late: bool = False  # the bus
    most_prefetches: int = 0
    hinted: float = 0  # recall and precision of a gate; 0: none

    def hints(self) -> HintSource | None:
        """Return fresh hints for each side, since they are drawn in turn."""
        return ModelledHints(self.hinted, self.hinted, SHAPE.experts) if self.hinted else None


@dataclass(frozen=True)
class Counts:
    """Counts of decode passes; all but the reads one by one."""

    events: list[int]
    hits: list[int]
    device_hits: list[int]
    cpu_events: list[int]
    copies: list[int]
    reads: int


class LateSlots:
    """DeviceSlots in which a copy ends only when it, or a kernel that uses it, is waited for."""

    def __init__(self, slots: DeviceSlots) -> None:
        self._slots, self._batch_in = slots, dict[int, int]()
        self._awaited, self._done = 0, 0  # batches: that kernels wait for, that have ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)

    def copy(self, host: Sequence[int], slots: Sequence[int], size: int) -> int:
        batch = self._slots.copy(host, slots, size)
        self._batch_in.update(dict.fromkeys(slots, batch))
        return batch

    def begin_read(self, slots: Sequence[int]) -> None:
        self._slots.begin_read(slots)
        self._awaited = max(self._awaited, *(self._batch_in[slot] for slot in slots))

    def finish(self) -> None:
        self._slots.finish()
        self._done = max(self._done, self._awaited)

    def wait(self, batch: int) -> None:
        self._slots.wait(batch)
        self._done = max(self._done, batch)

    def done(self, batch: int) -> bool:
        return batch <= self._done


def in_the_store(fake: Fake, recording: Recording, case: Tiers) -> Counts:
    fake.reset("mode=at_once")
    shape, math, stats = recording.shape, NoMath(), StoreStats()
    cells = shape.layers * shape.experts
    eamc, tracer = Eamc(64, shape.layers, shape.experts), Tracer(shape)

    def make(slots: int) -> Policy:
        return POLICIES[case.policy if slots < cells else "lru"](Setup(shape, slots, eamc))

    context = DeviceContext(Driver(fake.path))
    pool = SlotPool(case.host_slots, LAYOUT.slot_bytes)
    lock = HostLock(context, pool, 64 * LAYOUT.slot_bytes)
    host = HostTier(
        [LAYOUT] * cells, shape.experts, pool, AtOnce(), make(case.host_slots), math, stats  # type: ignore[arg-type]
    )  # fmt: skip

    def locked() -> PageLocking:
        locking = PageLocking(lock, case.host_slots, lambda: 1 << 40, 0)
        locking.wait()
        return locking

    tier = DeviceTier(
        context, lock, FakeDevice(fake), case.device_slots, make, math, host,
        lock_pages=locked,
    )  # fmt: skip
    if case.late:
        tier._slots = LateSlots(tier._arena)  # type: ignore[assignment]
    runner = TierRunner(host, tier, case.miss, case.share)
    store = ExpertStore(
        (host, tier), runner, most_prefetches=case.most_prefetches, hints=case.hinted > 0
    )
    hints, passes, last = case.hints(), list[StoreStats](), recording.last_pass()
    for index, running in enumerate(recording.passes):
        before = stats.copy()
        hinted = hints.of_pass(running) if hints is not None else None
        store.begin_pass(torch.from_numpy(running.rows), running.phase)
        x, weights = torch.zeros(len(running.rows), 1), torch.ones(running.ids.shape[1:])
        for layer, ids in enumerate(running.ids):
            if (ids < 0).all():
                continue
            if hinted is not None and store.wants_hints and layer + 1 < len(hinted):
                store.hint(layer + 1, torch.from_numpy(hinted[layer + 1]).long(), weights)
            pending = store.submit(layer, x, torch.from_numpy(ids).long(), weights)
            pending.result()
        store.end_pass(torch.from_numpy(running.accepted))
        if running.phase == "decode":
            passes.append(stats.since(before))
        tracer.add(running)
        for request in running.requests:
            if last[request] == index:
                store.end_request(request)
                eam = tracer.finish(request)
                if eam is not None:
                    eamc.add(eam.prefill, eam.decode)
    store.close()
    return Counts(
        [p.decode_events for p in passes],
        [p.decode_hits for p in passes],
        [p.decode_device_hits for p in passes],
        [p.decode_cpu_events for p in passes],
        [p.decode_bus_bytes // LAYOUT.data_bytes for p in passes],
        stats.decode_loads,
    )


def in_the_replay(recording: Recording, case: Tiers) -> Counts:
    shape = recording.shape
    conditions = Conditions(case.host_slots, TimeModel(ram_over_link=0), case.hints())
    speeds = LATE if case.late else AT_ONCE
    above = Above(case.device_slots, case.miss, speeds, case.share)
    eamc = Eamc(64, shape.layers, shape.experts)
    replay = TieredReplay(recording, POLICIES[case.policy], conditions, above, eamc)
    replay._most_prefetches = case.most_prefetches
    tokens = replay.run().tokens
    return Counts(
        [t.events for t in tokens],
        [t.hits for t in tokens],
        [t.device_hits for t in tokens],
        [t.cpu_events for t in tokens],
        [t.copies for t in tokens],
        sum(t.reads for t in tokens),
    )


@cache
def requests(batch: int = 1, layers: int = 4) -> Recording:
    """Return requests of different habits: long and short prompts, `batch` rows a pass."""
    shape = replace(SHAPE, layers=layers)
    recording, random = Recording("requests", shape), np.random.default_rng(5)
    for request in range(5):
        habit = random.dirichlet(np.full(16, 0.3), size=(3, layers))[request % 3] + 1e-3
        for rows in (40 if request % 2 else 7, *[batch] * 9):
            phase = "decode" if rows == batch else "prefill"
            builder = PassBuilder(shape, np.full(rows, request), phase)
            for layer, chances in enumerate(habit):
                ids = [
                    random.choice(16, 2, replace=False, p=chances / chances.sum())
                    for _ in range(rows)
                ]
                builder.routed(layer, np.array(ids))
            recording.add(builder.end())
    return recording


SLOTS = [(1, 1), (3, 5), (12, 30), (64, 20)]  # of the device, of the host
# Each pair of slots, policy and miss is in one case. All three together would be three times these.
PAIRS = [
    (policy, MISSES[(row + column) % len(MISSES)], *slots)
    for row, policy in enumerate(sorted(POLICIES))
    for column, slots in enumerate(SLOTS)
]


@pytest.mark.matrix
@pytest.mark.parametrize(("policy", "miss", "device", "host"), PAIRS)
def test_demand(fake: Fake, policy: str, miss: Miss, device: int, host: int) -> None:
    recording, case = requests(), Tiers(policy, device, host, miss)
    found = in_the_store(fake, recording, case)
    assert found == in_the_replay(recording, case)
    assert sum(found.events) == 5 * 9 * 4 * 2
    if miss == "fetch":
        assert sum(found.cpu_events) == 0
        assert sum(found.copies) == sum(found.events) - sum(found.device_hits)
    elif device < 64:
        assert sum(found.cpu_events) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("miss", MISSES)
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize(("device", "host"), [(1, 1), (3, 5), (12, 64)])
def test_a_bus_that_is_late(fake: Fake, policy: str, miss: Miss, device: int, host: int) -> None:
    recording, case = requests(), Tiers(policy, device, host, miss, late=True)
    found = in_the_store(fake, recording, case)
    assert found == in_the_replay(recording, case)
    if miss == "compute" and device > 1:
        in_time = in_the_replay(recording, replace(case, late=False))
        assert sum(found.copies) < sum(in_time.copies)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize(("layers", "device", "host"), [(4, 10, 30), (1, 2, 5)])
def test_several_rows_to_an_expert(
    fake: Fake, policy: str, layers: int, device: int, host: int
) -> None:
    """Cover prompts and batches.

    Prompts of 40 rows have experts that `auto` always fetches, and batches count every row. A
    layer may need more experts than there are slots, and some of them are resident.
    """
    recording, case = requests(3, layers), Tiers(policy, device, host, "auto", 0.25)
    prompt = recording.passes[10]
    assert np.bincount(prompt.ids[0].ravel()).max() > FEW_ROWS
    found = in_the_store(fake, recording, case)
    assert found == in_the_replay(recording, case)
    assert sum(found.events) == 3 * 5 * 9 * layers * 2


@pytest.mark.matrix
@pytest.mark.parametrize("miss", MISSES)
@pytest.mark.parametrize("policy", ["adaptive", "eamc"])
def test_reads_ahead(fake: Fake, policy: str, miss: Miss) -> None:
    """The host's policy prefetches no expert that the device has."""
    recording, case = requests(), Tiers(policy, 9, 24, miss, most_prefetches=4)
    assert in_the_store(fake, recording, case) == in_the_replay(recording, case)


@pytest.mark.matrix
@pytest.mark.parametrize("miss", MISSES)
@pytest.mark.parametrize("quality", [1.0, 0.7])
def test_hints(fake: Fake, quality: float, miss: Miss) -> None:
    recording, case = requests(), Tiers("adaptive", 9, 24, miss, most_prefetches=4, hinted=quality)
    assert in_the_store(fake, recording, case) == in_the_replay(recording, case)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_real_trace(fake: Fake, policy: str) -> None:
    recording = read_route_csv(TRACE)
    del recording.passes[6:]
    cells = recording.shape.layers * recording.shape.experts
    case = Tiers(policy, cells * 15 // 100, cells * 40 // 100, "auto", 25 / 55)
    found = in_the_store(fake, recording, case)
    assert found == in_the_replay(recording, case)
    assert min(map(sum, (found.device_hits, found.cpu_events, found.copies))) > 100
