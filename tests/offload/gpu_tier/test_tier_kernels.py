"""The device tier with the device's own kernels: in Triton's interpreter, over the fake's memory.

Everything but the GPU is the product's: shards, host slots, copies, slots, kernels, the sum over K.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from moeinf.models.layers.moe import TorchMath
from moeinf.native import DeviceContext, Driver, HostLock, SlotPool, _native
from moeinf.offload.format.layout import ExpertKey, ExpertLayout
from moeinf.offload.format.shards import shard_header, shard_path, write_file
from moeinf.offload.gpu_kernels.expert_ffn import DeviceMath
from moeinf.offload.gpu_tier.device_slots import DeviceTier
from moeinf.offload.gpu_tier.layer_runner import TierRunner
from moeinf.offload.gpu_tier.page_lock import PageLocking
from moeinf.offload.policy.base import Setup
from moeinf.offload.policy.table import POLICIES
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.store.compute import ExpertRunner, TorchFfn
from moeinf.offload.store.expert_store import ExpertStore
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.transfer import Transfer
from tests.fake_device import FakeDevice
from tests.native.fake_cuda import Fake
from tests.native.test_kernels import experts_of
from tests.offload.device import DEVICE

E, K, D, F = 5, 2, 64, 32


class KernelDevice(FakeDevice):
    """Triton's kernels instead of the CPU's."""

    def math(
        self, layout: ExpertLayout, address: int, shape: tuple[int, int], reference: TorchFfn
    ) -> ExpertRunner:
        memory = (ctypes.c_char * (shape[0] * shape[1])).from_address(address)
        arena = torch.frombuffer(memory, dtype=torch.uint8).view(shape)
        return self.later(DeviceMath(layout, arena, reference))


@pytest.mark.full  # Triton's interpreter is slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake's memory is not the GPU's")
@pytest.mark.parametrize("form", ["q4", "bf16"])
def test_the_cpus_bits_through_the_tier(
    form: str, fake: Fake, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert _native._use_kernels("portable")
    request.addfinalizer(lambda: _native._use_kernels(""))
    fake.reset("mode=deferred,seed=8")
    layout, shape = ExpertLayout(D, F, form.upper()), RoutingShape(1, E, K)
    data, _ = experts_of(form, E, D, F, True, 0.0)
    records = []
    for expert, one in enumerate(data):
        key, parts = ExpertKey(0, expert), [one.view(torch.uint8).numpy().data]
        records.append(write_file(tmp_path, shard_path(key), shard_header(key, layout), parts))
    context, math = DeviceContext(Driver(fake.path)), TorchMath()
    closers: list[Callable[[], None]] = []

    def store(device_slots: int) -> ExpertStore:
        pool = SlotPool(3, layout.slot_bytes)
        transfer = Transfer(tmp_path, records, pool, readers=1, direct_io=False)
        host = HostTier([layout] * E, E, pool, transfer, POLICIES["lru"](Setup(shape, 3)), math)
        found = ExpertStore((host,))
        if device_slots:
            lock = HostLock(context, pool, layout.slot_bytes)
            tier = DeviceTier(
                context, lock, KernelDevice(fake), device_slots,
                lambda slots: POLICIES["lru"](Setup(shape, slots)), math, host,
                lock_pages=lambda: PageLocking(lock, 3, lambda: 1 << 40, 0),
            )  # fmt: skip
            found = ExpertStore((host, tier), TierRunner(host, tier, "fetch", 1.0))
        closers.append(found.close)
        return found

    random = torch.Generator().manual_seed(1)
    stores = [store(0), store(2)]
    for tokens in (1, 1, 4, 1):
        x = torch.randn(tokens, D, generator=random).bfloat16()
        ids = torch.rand(tokens, E, generator=random).argsort(1)[:, :K].contiguous()
        weights = torch.rand(tokens, K, generator=random)
        results = []
        for one in stores:
            one.begin_pass(torch.zeros(tokens, dtype=torch.int64), "decode")
            results.append(one.submit(0, x, ids, weights).result())
            one.end_pass()
        assert torch.equal(*results)
    assert stores[1].stats.bus_bytes > 2 * layout.data_bytes
    for close in closers:
        close()
