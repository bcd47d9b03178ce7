"""The driver layer, page-locking and device slots, over the fake libcuda: no GPU is needed.

A wrong order of copies and kernels shows as wrong bytes; device_driver.cpp does the same under
sanitizers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeinf.native import (
    LEAST_BATCHED_BYTES,
    DeviceContext,
    DeviceError,
    DeviceSlots,
    Driver,
    HostLock,
    NoDriver,
    OutOfDeviceMemory,
    SlotPool,
)
from tests.native.fake_cuda import Fake, built_fake, view

KIB = 1 << 10


@dataclass
class Rig:
    """A pool, its lock and device slots, with the content of each host and device slot."""

    fake: Fake
    host_slots: int = 5
    device_slots: int = 3
    slot_bytes: int = 4096
    slice_slots: int = 2
    least_batched: int = LEAST_BATCHED_BYTES
    seen: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = DeviceContext(Driver(self.fake.path))
        self.pool = SlotPool(self.host_slots, self.slot_bytes)
        self.lock = HostLock(self.context, self.pool, self.slice_slots * self.slot_bytes)
        self.slots = DeviceSlots(self.context, self.lock, self.device_slots, 0, self.least_batched)
        self.memory = memoryview(self.pool).cast("B")
        self.expected = [b""] * self.device_slots
        self.version = 0

    def fill(self, slot: int) -> None:
        self.version += 1
        start = slot * self.slot_bytes
        self.memory[start : start + self.slot_bytes] = self.content(self.version)

    def content(self, version: int) -> bytes:
        return bytes([version % 251 + 1]) * self.slot_bytes

    def held(self, slot: int) -> bytes:
        start = slot * self.slot_bytes
        return bytes(self.memory[start : start + self.slot_bytes])

    def copy(self, pairs: dict[int, int]) -> int:
        """Copy host slots to device slots; pairs maps device slot to host slot."""
        batch = self.slots.copy(list(pairs.values()), list(pairs), self.slot_bytes)
        for slot, source in pairs.items():
            self.expected[slot] = self.held(source)
        return batch

    def read(self, slots: list[int]) -> None:
        """Queue a kernel that reads the slots when its stream reaches it."""
        self.slots.begin_read(slots)
        for slot in slots:
            place = view(self.slots.address + slot * self.slot_bytes, self.slot_bytes)
            wanted = self.expected[slot]
            self.fake.launch(0, lambda p=place, w=wanted: self.seen.append((bytes(p.raw), w)))
        self.slots.end_read(slots)

    def check(self) -> None:
        self.slots.finish()
        assert all(found == wanted for found, wanted in self.seen)


@pytest.fixture(params=["mode=deferred,seed=7", "mode=threads,delay_us=300"])
def rig(request: pytest.FixtureRequest, fake: Fake) -> Rig:
    fake.reset(request.param)
    return Rig(fake)


def test_what_there_is(fake: Fake) -> None:
    fake.reset("memory=1000000,devices=2,context=4096")
    driver = Driver(fake.path)
    assert (driver.devices, driver.version, driver.has_batches) == (2, 13000, True)
    assert driver.info(1) == ("Fake GPU", 1000000, "0000:65:00.0")
    assert DeviceContext(driver, 1).memory() == (1000000 - 4096, 1000000)
    with pytest.raises(DeviceError, match="cuDeviceGet: CUDA_ERROR_INVALID_VALUE"):
        DeviceContext(driver, 2)


def test_no_driver_and_no_device(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(NoDriver, match=r"libnothing\.so"):
        Driver("libnothing.so.1")
    (tmp_path / "libc.so").write_bytes(b"not a library")
    with pytest.raises(NoDriver):
        Driver(str(tmp_path / "libc.so"))
    with pytest.raises(NoDriver, match="has no cuInit"):
        Driver("libm.so.6")
    fake.reset("devices=0")
    with pytest.raises(DeviceError) as caught:
        Driver(fake.path)
    assert (caught.value.name, caught.value.call) == ("CUDA_ERROR_NO_DEVICE", "cuInit")


def test_bytes_arrive_before_kernels_and_stay_until_they_ran(rig: Rig) -> None:
    for slot in range(rig.host_slots):
        rig.fill(slot)
    rig.copy({0: 4, 1: 3})
    rig.read([1, 0])
    batch = rig.copy({1: 2, 2: 0})  # overwrites what a queued kernel reads
    rig.read([0, 1, 2])
    rig.slots.wait(batch)
    rig.fill(2)  # no queued kernel reads it any more
    rig.copy({0: 2})
    rig.read([0])
    rig.check()
    assert len(rig.seen) == 6


steps = st.lists(
    st.one_of(
        st.tuples(st.just("fill"), st.integers(0, 4)),
        st.tuples(st.just("lock"), st.just(0)),
        st.tuples(
            st.just("copy"),
            st.dictionaries(st.integers(0, 2), st.integers(0, 4), min_size=1, max_size=3),
        ),
        st.tuples(st.just("read"), st.lists(st.integers(0, 2), unique=True, min_size=1)),
        st.tuples(
            st.just("fail"),
            st.sampled_from(["cuMemcpyHtoDAsync", "cuMemcpyBatchAsync", "cuEventRecord"]),
        ),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(1, 1 << 30), plays=steps)
def test_any_order_of_things(fake: Fake, seed: int, plays: list[tuple[str, object]]) -> None:
    """Fills wait for their readers; after a failed copy its sources are free at once."""
    fake.reset(f"mode=deferred,seed={seed}")
    rig, reading = Rig(fake, least_batched=1), dict[int, int]()  # host slot -> batch
    for kind, what in plays:
        if kind == "fill":
            assert isinstance(what, int)
            if what in reading:
                rig.slots.wait(reading.pop(what))
            rig.fill(what)
        elif kind == "lock" and rig.lock.next_bytes:
            rig.lock.lock_next()
        elif kind == "copy":
            assert isinstance(what, dict)
            batch = rig.copy(what)
            reading.update(dict.fromkeys(what.values(), batch))
        elif kind == "read":
            assert isinstance(what, list)
            there = [slot for slot in what if rig.expected[slot]]
            if there:
                rig.read(there)
        elif kind == "fail":
            if rig.lock.locked_slots < 2 and what == "cuMemcpyBatchAsync":
                continue
            if rig.lock.locked_slots >= 2 and what == "cuMemcpyHtoDAsync":
                continue
            fake.configure(f"fail={what}:0:999:1")
            with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
                rig.slots.copy([0, 1], [0, 1], rig.slot_bytes)
            rig.expected[:2] = b"", b""
    rig.check()


def large_rig(fake: Fake) -> Rig:
    """Return a rig with all host slots full and page-locked.

    Its slots are large, so their copies form one batch.
    """
    fake.reset("mode=deferred,seed=3")
    rig = Rig(fake, slot_bytes=LEAST_BATCHED_BYTES)
    for slot in range(5):
        rig.fill(slot)
        if rig.lock.next_bytes:
            rig.lock.lock_next()
    return rig


def test_what_is_page_locked_goes_together_beside_what_is_not(fake: Fake) -> None:
    fake.reset("mode=deferred,seed=4")
    rig = Rig(fake, least_batched=1)
    rig.lock.lock_next()  # slots 0 and 1
    for slot in range(5):
        rig.fill(slot)
    rig.copy({0: 1, 1: 4, 2: 0})
    rig.read([0, 1, 2])
    rig.check()
    assert (fake.count("cuMemcpyBatchAsync"), fake.count("cuMemcpyHtoDAsync")) == (1, 1)
    assert fake.count("pageable copies") == 1


@pytest.mark.first  # each builds a library
@pytest.mark.parametrize(("version", "batches"), [(12040, 0), (12080, 1), (13000, 1)])
def test_every_generation_of_the_batched_call(
    version: int, batches: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    older = Fake(built_fake(tmp_path_factory.getbasetemp(), version))
    older.reset("mode=deferred,seed=8")
    rig = Rig(older, least_batched=1)
    assert Driver(older.path).version == version
    rig.lock.lock_next()
    rig.fill(0)
    rig.fill(1)
    rig.copy({0: 1, 2: 0})
    rig.read([2, 0])
    rig.check()
    assert older.count("cuMemcpyBatchAsync") == batches
    assert older.count("cuMemcpyHtoDAsync") == 2 * (1 - batches)


def test_one_call_for_a_layer_where_the_driver_has_it(fake: Fake) -> None:
    large = large_rig(fake)
    large.copy({0: 1, 1: 2, 2: 3})
    large.read([0, 1, 2])
    large.check()
    assert (fake.count("cuMemcpyBatchAsync"), fake.count("cuMemcpyHtoDAsync")) == (1, 0)
    small = Rig(fake)
    small.fill(1)
    small.lock.lock_next()
    small.copy({0: 1, 1: 0})  # the driver would run such a batch before the call returns
    assert (fake.count("cuMemcpyBatchAsync"), fake.count("cuMemcpyHtoDAsync")) == (1, 2)
    assert fake.count("synchronous batches") == 0


@pytest.mark.parametrize(("code", "again"), [(801, 1), (1, 1), (719, 0)])
def test_a_driver_that_refuses_batches_is_asked_once(fake: Fake, code: int, again: int) -> None:
    """For "not supported" or "invalid value" the copies go one by one; another code is an error."""
    rig = large_rig(fake)
    fake.configure(f"fail=cuMemcpyBatchAsync:0:{code}:-1")
    if not again:
        with pytest.raises(DeviceError, match="cuMemcpyBatchAsync: CUDA_ERROR_LAUNCH_FAILED"):
            rig.copy({0: 1, 1: 2})
        return
    for pairs in ({0: 1, 1: 2}, {1: 3, 2: 4}):
        rig.copy(pairs)
        rig.read(list(pairs))
    rig.check()
    assert len(rig.seen) == 4
    assert (fake.count("cuMemcpyBatchAsync"), fake.count("cuMemcpyHtoDAsync")) == (1, 4)


def test_slices_hold_whole_slots(fake: Fake) -> None:
    fake.reset()
    rig = Rig(fake, host_slots=5, slice_slots=2)
    sizes = []
    while rig.lock.next_bytes:
        sizes.append(rig.lock.next_bytes // rig.slot_bytes)
        rig.lock.lock_next()
    assert sizes == [2, 2, 1]
    assert (rig.lock.locked_slots, fake.count("registered")) == (5, 5 * rig.slot_bytes)
    rig.copy({0: 1, 1: 2, 2: 4})  # no copy crosses two slices, which the driver would refuse
    assert fake.count("pageable copies") == 0
    rig.slots.finish()
    del rig
    assert fake.count("registered") == fake.count("allocated") == fake.count("handles") == 0


def test_what_cannot_be_locked_is_copied_all_the_same(fake: Fake) -> None:
    fake.reset("mode=deferred,seed=5,lockable=8192")
    rig = Rig(fake)
    rig.lock.lock_next()
    with pytest.raises(OutOfDeviceMemory, match="cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"):
        rig.lock.lock_next()
    assert rig.lock.locked_slots == 2
    for slot in range(5):
        rig.fill(slot)
    rig.copy({0: 1, 1: 4})
    rig.read([0, 1])
    rig.check()
    assert fake.count("pageable copies") == 1


def test_after_a_failed_copy_nothing_reads_its_sources(fake: Fake) -> None:
    fake.reset("mode=deferred,seed=2")
    rig = Rig(fake)
    rig.lock.lock_next()
    rig.fill(0)
    rig.fill(1)
    fake.configure("fail=cuMemcpyHtoDAsync:1:999:1")
    with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
        rig.slots.copy([0, 1], [0, 1], rig.slot_bytes)
    first = rig.held(0)
    rig.fill(0)  # the copy of slot 0 was queued and has ended by now
    assert bytes(view(rig.slots.address, rig.slot_bytes).raw) == first
    rig.copy({0: 0})
    rig.read([0])
    rig.check()


def test_a_fault_of_the_device_is_told_by_every_call(fake: Fake) -> None:
    """The queued copy fails when it runs; a later call and every call after it raise the error."""
    fake.reset("mode=deferred,seed=2")
    rig = Rig(fake)
    fake.configure("fail=cuMemcpyHtoDAsync:0:700:1")
    batch = rig.copy({0: 0})
    for call in (lambda: rig.slots.wait(batch), rig.slots.finish, lambda: rig.copy({0: 0})):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.name == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_arenas_that_do_not_fit(fake: Fake) -> None:
    fake.reset("memory=65536,context=4096")
    with pytest.raises(OutOfDeviceMemory, match="cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of"):
        Rig(fake, device_slots=16)
    assert Rig(fake, device_slots=15).context.memory() == (0, 65536)


def test_arguments_that_are_none(fake: Fake) -> None:
    fake.reset()
    rig = Rig(fake)
    with pytest.raises(ValueError, match="at least one slot"):
        DeviceSlots(rig.context, rig.lock, 0, 0)
    for host, device, size, words in (
        ([5], [0], 1, "no host slot 5"),
        ([0], [3], 1, "no device slot 3"),
        ([], [], 1, "as it reads, at least one"),
        ([0], [0, 1], 1, "as many slots"),
        ([0], [0], 4097, "batch"),
        ([0], [0], 0, "batch"),
    ):
        with pytest.raises(ValueError, match=words):
            rig.slots.copy(host, device, size)
    with pytest.raises(ValueError, match="no device slot 3"):
        rig.slots.begin_read([3])
