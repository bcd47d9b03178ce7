"""Speed measurements of bus and CPU; test_gpu_engine.py tests their use."""

from __future__ import annotations

import pytest

from moeinf.native import DeviceContext, Driver
from moeinf.runtime.machine import bus_bench, memory
from tests.native.fake_cuda import Fake


@pytest.mark.parametrize(
    ("caches", "available", "wanted"), [(0, 1 << 40, 64), (96, 1 << 40, 192), (96, 512 << 20, 128)]
)
def test_experts_do_not_fit_into_the_caches(
    caches: int, available: int, wanted: int, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MiB: twice the caches, at most a quarter of free memory, and never below a minimum."""
    fake.reset("mode=at_once")
    monkeypatch.setattr(bus_bench, "cache_bytes", lambda: caches << 20)
    monkeypatch.setattr(bus_bench, "available_bytes", lambda: available)
    bench = bus_bench._Bench(DeviceContext(Driver(fake.path)), 1 << 20, 1 << 20, 9)
    assert bench.pool.slots == wanted


def test_a_batch_is_queued_before_the_last_is_waited_for(fake: Fake) -> None:
    fake.reset("mode=deferred,seed=6")
    bench = bus_bench._Bench(DeviceContext(Driver(fake.path)), 1 << 20, 1 << 20, 9)
    assert [bench.copy() for _ in range(5)] == [4 << 20] * 5
    assert fake.count("cuMemcpyBatchAsync") == 5
    assert fake.count("cuEventSynchronize") == 4


@pytest.mark.parametrize(("caches", "slots"), [(0, 2), (32, 2), (160, 6)])
def test_large_experts_take_no_more_device_slots_than_there_are(
    caches: int, slots: int, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's pool grows with the caches (in MiB); the number of device slots does not."""
    fake.reset("mode=deferred,seed=6")
    monkeypatch.setattr(bus_bench, "cache_bytes", lambda: caches << 20)
    monkeypatch.setattr(bus_bench, "available_bytes", lambda: 1 << 40)
    bench = bus_bench._Bench(DeviceContext(Driver(fake.path)), 48 << 20, 1 << 20, 3)
    assert bench.pool.slots == slots
    assert fake.count("allocated") == 2 * (48 << 20)
    assert [bench.copy() for _ in range(3)] == [1 << 20] * 3


def test_caches_that_cores_share_count_once() -> None:
    """The sum is below 1 GiB per core on any machine; without information it is 0."""
    found = memory.cache_bytes()
    assert 0 <= found < memory.core_count() << 30
    assert found % 1024 == 0
