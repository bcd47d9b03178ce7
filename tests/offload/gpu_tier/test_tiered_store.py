"""Three tiers against the resident reference, over the fake libcuda: the same bits always.

With the fake the device computes with the CPU's arithmetic. So every way to handle misses, not only
`fetch`, must give the reference's bits. Only the order in which streams run differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeinf.models.layers.moe import TorchMath
from moeinf.native import (
    DeviceContext,
    DeviceError,
    DeviceSlots,
    Driver,
    HostLock,
    OutOfDeviceMemory,
    SlotPool,
)
from moeinf.offload.format.layout import ExpertKey, largest_slot_bytes
from moeinf.offload.format.shards import shard_path
from moeinf.offload.gpu_tier import device_slots as device_tier
from moeinf.offload.gpu_tier.device_slots import DeviceTier
from moeinf.offload.gpu_tier.layer_runner import OutOfMemory, TierRunner
from moeinf.offload.gpu_tier.miss_split import MISSES, Contended, Miss, Split
from moeinf.offload.gpu_tier.page_lock import PageLocking
from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES, USE_HINTS, USE_PAST
from moeinf.offload.routing.trace import Phase, RoutingShape
from moeinf.offload.store.expert_store import ExpertStore, Stopped
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.transfer import ExpertReadError, Transfer
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake
from tests.offload.store.test_expert_store import (
    E,
    K,
    L,
    Shards,
    make_mixed,
    make_shards,
    past,
    routing,
)


class Rig:
    """A tiered store and its parts."""

    def __init__(
        self, fake: Fake, shards: Shards, device_slots: int, host_slots: int,
        miss: Miss = "fetch", policy: str = "lru", share: float = 0.5,
    ) -> None:  # fmt: skip
        math, shape = TorchMath(), RoutingShape(L, E, K)
        context = DeviceContext(Driver(fake.path))
        pool = SlotPool(host_slots, largest_slot_bytes(shards.layouts))
        lock = HostLock(context, pool, 2 * pool.slot_bytes)
        self.expert_bytes = shards.layouts[0].data_bytes  # in the first layer
        transfer = Transfer(shards.folder, shards.records, pool, readers=2, direct_io=False)
        lower = POLICIES[policy](Setup(shape, host_slots, past()))
        self.host = HostTier(shards.layouts, E, pool, transfer, lower, math)
        self.device = FakeDevice(fake)
        self.tier = DeviceTier(
            context, lock, self.device, device_slots,
            lambda slots: POLICIES[policy](Setup(shape, slots, past())), math, self.host,
            lock_pages=lambda: PageLocking(lock, host_slots, lambda: 1 << 40, 0),
        )  # fmt: skip
        runner = TierRunner(self.host, self.tier, miss, share)
        self.store = ExpertStore(
            (self.host, self.tier), runner,
            most_prefetches=2 * K if policy in USE_PAST else 0, hints=policy in USE_HINTS,
        )  # fmt: skip

    def layer(self, layer: int, asked: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return self.store.submit(layer, *asked).result()

    def one(self, layer: int, tokens: int, seed: int) -> Tensor:
        """Run a pass of one layer."""
        phase: Phase = "decode" if tokens == 1 else "prefill"
        self.store.begin_pass(torch.zeros(tokens, dtype=torch.int64), phase)
        out = self.layer(layer, routing(tokens, seed))
        self.store.end_pass()
        return out

    def close(self) -> None:
        self.store.close()


Rigs = Callable[..., Rig]


@pytest.fixture(scope="module", params=[make_shards, make_mixed], ids=["one format", "mixed"])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    made: Shards = request.param(tmp_path_factory.mktemp("shards"))
    return made


@pytest.fixture(autouse=True)
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy page-locked experts in batches, although they are small."""
    slots = partial(DeviceSlots, least_batched_bytes=1)
    monkeypatch.setattr(device_tier, "DeviceSlots", slots)


@pytest.fixture
def rigs(fake: Fake, shards: Shards) -> Iterator[Rigs]:
    """Return a maker of rigs, which are closed after the test."""
    fake.reset("mode=deferred,seed=11")
    made: list[Rig] = []

    def make(*slots: int, miss: Miss = "fetch", policy: str = "lru") -> Rig:
        made.append(Rig(fake, shards, slots[0], slots[1], miss, policy))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(1, 1 << 30),
    device_slots=st.integers(1, L * E),
    host_slots=st.integers(1, L * E),
    miss=st.sampled_from(MISSES),
    share=st.floats(0, 1),
    policy=st.sampled_from(sorted(POLICIES)),
    passes=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 99), st.booleans()), max_size=6),
)
def test_any_tiers_any_order_of_streams(
    fake: Fake,
    shards: Shards,
    seed: int,
    device_slots: int,
    host_slots: int,
    miss: Miss,
    share: float,
    policy: str,
    passes: list[tuple[int, int, bool]],
) -> None:
    """The reference's bits, nothing pinned, and every event counted once."""
    fake.reset(f"mode=deferred,seed={seed}")
    rig, events = Rig(fake, shards, device_slots, host_slots, miss, policy, share), 0
    store = rig.store
    try:
        for tokens, number, hints in passes:
            store.begin_pass(
                torch.zeros(tokens, dtype=torch.int64), "decode" if tokens == 1 else "prefill"
            )
            for layer in range(L):
                asked = routing(tokens, number + layer, none=0.1)
                if hints and store.wants_hints and layer + 1 < L:
                    _, ids, scores = routing(tokens, number + layer + 1)
                    store.hint(layer + 1, ids, scores)
                pending = store.submit(layer, *asked)
                expected = shards.reference.submit(layer, *asked).result()
                assert torch.equal(pending.result(), expected)
                assert store.device_resident <= device_slots
                assert store.resident <= host_slots
                events += int((asked[1] >= 0).sum())
            store.end_pass()
            assert store.idle
        stats = store.stats
        assert stats.decode_events + stats.prefill_events == events
        assert stats.decode_device_hits + stats.decode_cpu_events <= stats.decode_events
        assert stats.bus_bytes == fake.count("bytes copied")
        if miss == "fetch":
            assert stats.decode_cpu_events == 0
    finally:
        rig.close()


@pytest.mark.parametrize("miss", MISSES)
def test_with_real_threads(fake: Fake, shards: Shards, miss: Miss) -> None:
    fake.reset("mode=threads,delay_us=400")
    rig = Rig(fake, shards, 4, 7, miss, "adaptive")
    try:
        for seed in range(25):
            asked = routing(1 if seed % 3 else 9, seed)
            expected = shards.reference.submit(seed % L, *asked).result()
            assert torch.equal(rig.one(seed % L, len(asked[0]), seed), expected)
    finally:
        rig.close()


def test_bytes_over_the_bus(rigs: Rigs) -> None:
    """Compare with a count by hand: a hit costs none, an evicted expert is fetched again."""
    rig = rigs(2, 6)

    def decode(*ids: int) -> tuple[int, int]:
        before = rig.store.stats.copy()
        rig.store.begin_pass(torch.zeros(1, dtype=torch.int64), "decode")
        rig.layer(0, (torch.ones(1, 16), torch.tensor([ids]), torch.ones(1, K)))
        rig.store.end_pass()
        since = rig.store.stats.since(before)
        return since.decode_bus_bytes // rig.expert_bytes, since.decode_device_hits

    assert decode(1, 2) == (2, 0)
    assert decode(2, 1) == (0, 2)
    assert decode(2, 3) == (1, 1)  # 1 leaves: it was used first
    assert decode(1, 2) == (1, 1)
    stats = rig.store.stats
    assert (stats.decode_events, stats.decode_hits, stats.decode_device_hits) == (8, 5, 4)
    assert stats.decode_loads == 3  # 1 came back from the host's slot


def test_what_the_cpu_computes_is_promoted_while_the_bus_is_idle(rigs: Rigs) -> None:
    rig = rigs(3, 6, miss="compute")
    assert rig.one(0, 1, 5) is not None
    assert rig.store.stats.decode_cpu_events == K
    assert rig.store.stats.decode_bus_bytes == K * rig.expert_bytes
    assert rig.store.idle
    rig.one(0, 1, 5)
    assert rig.store.stats.decode_device_hits == K
    assert rig.store.stats.decode_cpu_events == K


@pytest.mark.parametrize(
    "call", ["cuMemcpyBatchAsync", "cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent"]
)
@pytest.mark.parametrize("miss", MISSES)
def test_a_failing_call_is_an_error_with_a_name(
    rigs: Rigs, fake: Fake, shards: Shards, monkeypatch: pytest.MonkeyPatch, miss: Miss, call: str
) -> None:
    """Whenever it fails, the store is idle again, and goes on when the device does."""
    if call == "cuMemcpyHtoDAsync":
        monkeypatch.setattr(device_tier, "DeviceSlots", DeviceSlots)  # one by one
    rig, failed = rigs(4, L * E, miss=miss), 0
    for seed in range(30):
        fake.configure(f"fail={call}:{seed % 3}:999:1")
        try:
            rig.one(seed % L, 5, seed)
        except DeviceError as error:
            failed += (error.name, error.call) == ("CUDA_ERROR_UNKNOWN", call)
        assert rig.store.idle
        expected = shards.reference.submit(1, *routing(3, seed)).result()
        fake.configure("mend")
        assert torch.equal(rig.one(1, 3, seed), expected)
    assert failed > 0


def test_no_memory_for_a_computation(rigs: Rigs, shards: Shards) -> None:
    """The tier continues with half the slots; if that is not enough, it raises."""
    rig = rigs(6, 6)
    rig.one(0, 1, 1)
    rig.device.no_memory = 1
    expected = shards.reference.submit(0, *routing(4, 2)).result()
    assert torch.equal(rig.one(0, 4, 2), expected)
    assert (rig.tier.slots, rig.device.released) == (3, 1)
    rig.device.no_memory = 2
    with pytest.raises(OutOfMemory, match="no device memory is left, with 1 slots: a test's"):
        rig.one(1, 4, 2)
    assert rig.store.idle
    assert torch.equal(rig.one(0, 4, 2), expected)


def test_not_even_one_slot_finds_memory(fake: Fake, rigs: Rigs, shards: Shards) -> None:
    """Others have taken what the tier gave back: an error, and the CPU goes on alone."""
    rig = rigs(6, 6, miss="compute")
    rig.one(0, 1, 1)
    rig.device.no_memory = 1
    fake.configure("fail=cuMemAlloc:0:2:9")
    with pytest.raises(OutOfDeviceMemory, match="cuMemAlloc"):
        rig.one(0, 1, 1)
    assert rig.store.idle
    for seed in (1, 2):
        expected = shards.reference.submit(0, *routing(1, seed)).result()
        assert torch.equal(rig.one(0, 1, seed), expected)
    assert rig.store.device_resident == 0


def test_an_arena_that_finds_no_memory_is_tried_twice(
    fake: Fake, shards: Shards, rigs: Rigs
) -> None:
    fake.configure("fail=cuMemAlloc:0:2:1")
    assert rigs(3, 3).device.released == 1
    fake.configure("fail=cuMemAlloc:0:2:2")
    with pytest.raises(OutOfDeviceMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        rigs(3, 3)


def test_damage_and_stopping_leave_the_store_idle(fake: Fake, tmp_path: Path) -> None:
    fake.reset("mode=deferred,seed=4")
    shards = make_shards(tmp_path)
    rig = Rig(fake, shards, 3, 4)
    try:
        (tmp_path / shard_path(ExpertKey(1, 3))).unlink()
        everyone = (torch.ones(3, 16), torch.arange(E).view(3, K), torch.ones(3, K))
        rig.store.begin_pass(torch.zeros(3, dtype=torch.int64), "prefill")
        with pytest.raises(ExpertReadError):
            rig.layer(1, everyone)
        assert rig.store.idle
        rig.store.stopped = lambda: True
        with pytest.raises(Stopped):
            rig.layer(0, everyone)
        rig.store.stopped = lambda: False
        expected = shards.reference.submit(0, *everyone).result()
        assert torch.equal(rig.layer(0, everyone), expected)
    finally:
        rig.close()


def test_page_locking_ends_with_a_reason(fake: Fake, shards: Shards) -> None:
    fake.reset("mode=deferred,seed=4,lockable=9000")
    context, pool = DeviceContext(Driver(fake.path)), SlotPool(5, 4096)
    refused = PageLocking(HostLock(context, pool, 4096), 5, lambda: 1 << 40, 0)
    refused.wait()
    assert refused.note is not None
    assert refused.note.startswith("2 of 5 host slots are page-locked")
    assert "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY" in refused.note
    del refused
    fake.reset()
    short = PageLocking(HostLock(context, pool, 8192), 5, iter([30000, 20000]).__next__, 15000)
    short.wait()
    assert short.note is not None
    assert short.note.startswith("2 of 5 host slots")
    assert "headroom" in short.note
    whole = PageLocking(HostLock(context, SlotPool(5, 4096), 8192), 5, lambda: 1 << 40, 0)
    whole.wait()
    assert whole.note is None


def test_shares_of_misses() -> None:
    assert Contended(12e9, 36e9).fetched_share == 0.25
    split = Split(0.25)  # the CPU computes three while the bus moves one
    assert [split.fetched(misses) for misses in range(10)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert [split.fetched(8, behind) for behind in range(7)] == [2, 1, 0, 0, 0, 0, 0]
    assert Split(1).fetched(7, 5) == 7
    assert Split(0).fetched(7) == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "eamc", "adaptive"])
def test_a_prefill_copies_beside_the_kernels_of_the_batch_before(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Even where the policy prefers a victim whose kernel still runs: a copy over it would wait."""
    rig, slots = rigs(4, L * E, policy=policy), list[set[int]]()
    for layer in range(L):
        rig.one(layer, 9, layer)
    copy = rig.tier._copy

    def noted(cells: list[int]) -> None:
        slots.append({rig.tier.table.slot_of(cell) for cell in cells})
        copy(cells)

    monkeypatch.setattr(rig.tier, "_copy", noted)
    for layer in range(L):
        slots.clear()
        rig.one(layer, 9, layer)
        assert len(slots) > 1
        assert all(one.isdisjoint(other) for one, other in pairwise(slots))


def test_who_nobody_asked_for_comes_by_bytes_and_past_those_who_are_there(
    rigs: Rigs, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(layout.data_bytes for layout in shards.layouts)
    monkeypatch.setattr(device_tier, "_UNASKED_BYTES", 3 * largest)
    rig = rigs(L * E, L * E)
    rig.store.warm(range(L * E))
    for layer in range(L):
        rig.one(layer, 9, layer)  # the last reads are waited for
    while not all(rig.host.table.is_resident(cell) for cell in range(L * E)):
        rig.host.settle()
    before = rig.store.device_resident
    assert before > 3
    for more in (3, 6):
        rig.tier.end_copies()
        rig.tier.bring_absent()
        assert rig.store.device_resident == min(L * E, before + more)


def test_after_a_rebuild_experts_come_back_layer_by_layer(
    rigs: Rigs, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer needs no host once all of it is there, so its experts come together."""
    largest = max(layout.data_bytes for layout in shards.layouts)
    monkeypatch.setattr(device_tier, "_UNASKED_BYTES", E * largest)
    monkeypatch.setattr(device_tier, "_LOOKED_AT", 2 * E)
    rig = rigs(L * E + 1, L * E)
    rig.store.warm(range(L * E))
    while not all(rig.host.table.is_resident(cell) for cell in range(L * E)):
        rig.host.settle()
    assert rig.tier.give_up(1, 1) == 1
    for layer in range(L):
        rig.tier.end_copies()
        rig.tier.bring_absent()
        whole = [rig.tier.slot_table(n * E, E) is not None for n in range(L)]
        assert whole == [n <= layer for n in range(L)]
    assert rig.tier.count == L * E
