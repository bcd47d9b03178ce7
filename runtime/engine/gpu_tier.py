"""Build the device tier of one engine: context, page-locking, arena, policy, shares.

The store closes all parts that are opened here.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from moeinf.models.base import Activation
from moeinf.models.layers.moe import TorchMath
from moeinf.native import DeviceContext, HostLock, SlotPool
from moeinf.offload.gpu_tier.device_slots import DeviceTier
from moeinf.offload.gpu_tier.miss_split import Contended, Miss
from moeinf.offload.gpu_tier.page_lock import SLICE_BYTES, PageLocking
from moeinf.offload.policy.base import Policy, Setup
from moeinf.offload.policy.table import POLICIES, USE_PAST
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import RoutingShape
from moeinf.offload.store.host_tier import HostTier
from moeinf.offload.store.tier import Upper
from moeinf.runtime.config import EngineConfig, Settings
from moeinf.runtime.dense.gpu_backend import DevicePieces
from moeinf.runtime.engine.gpu_budget import Promise
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.machine.bus_bench import measure_contended
from moeinf.runtime.machine.device_choice import DeviceUnavailable, check_usable
from moeinf.runtime.machine.measurements import remember_gpu, remembered_contended
from moeinf.runtime.machine.memory import available_bytes
from moeinf.runtime.placement.gpu_plan import DevicePlacement
from moeinf.runtime.sizes import format_bytes

_HOST_HEADROOM_BYTES = 1 << 30  # never page-locked: the rest of the machine needs it


@dataclass(frozen=True)
class OpenGpu:
    """A GPU in use: its context, its arithmetic, and how misses are divided."""

    context: DeviceContext
    device: gpus.TorchDevice
    placement: DevicePlacement
    miss: Miss
    share: float  # the bus's part of the misses that bus and CPU read in the same time
    notes: tuple[str, ...]
    promise: Promise
    dense_math: DevicePieces | None  # with the dense weights there; None: they are in RAM

    def close(self) -> None:
        """Give back torch's cached memory; nothing on the device is used afterwards."""
        self.device.limit(0)
        self.device.release()

    @gpus.device_faults()
    def keep_promise(self, above: Upper) -> tuple[str, ...]:
        """Give device slots up for memory that CUDA takes beyond what was counted for it.

        Returns lines for the user. `above` has the slots.
        """
        given, promise, excess = None, self.promise, self.promise.excess()
        if not excess.size_bytes:
            return ()
        for more in (promise.margin_bytes, 0) if excess.beyond_bytes else (0,):
            with suppress(*self.device.out_of_memory):  # others may take what was given up
                size, beyond = excess.of_torch_bytes + more, excess.beyond_bytes + more
                given = above.give_up(size, beyond)
            if given is not None:
                promise.keep(more)
                break
        if given == 0:
            return ()  # the budget had room for it
        words = f"CUDA itself takes {format_bytes(excess.size_bytes)} more than counted: "
        words += f"{given} device slots given back" if given else "--device-memory is exceeded"
        return (words,)


def open_gpu(
    placement: DevicePlacement,
    manifest: Manifest,
    config: EngineConfig,
    settings: Settings,
    threads: int,
) -> OpenGpu:
    """Open the GPU; measure bus and CPU, with such experts and `threads`, when needed.

    Raises DeviceUnavailable.
    """
    found = gpus.find_gpu(config.libcuda)
    if isinstance(found, gpus.NoGpu):
        raise DeviceUnavailable(f"--device cuda: {found.why}")
    check_usable(found.name)
    context = gpus.open_context(found)
    share, notes = (1.0 if config.miss == "fetch" else 0.0), tuple[str, ...]()
    if config.miss == "auto":
        layout = max(manifest.expert_layouts, key=lambda layout: layout.data_bytes)
        forms = "/".join(dict.fromkeys(layout.forms))
        what = f"{forms}, {layout.slot_bytes} bytes, {threads} threads"
        speeds = remembered_contended(settings, found.name, what)
        if speeds is None:
            math = TorchMath(cast(Activation, manifest.activation))
            speeds = measure_contended(context, layout, math, placement.slots)
            remember_gpu(settings, found.name, contended=(what, speeds))
        share, notes = speeds.fetched_share, (_words(speeds),)
    device = gpus.torch_device(settings.graphs)
    promise = Promise(placement, gpus.held_memory(found), context, device.reserved_bytes)
    device.limit(placement.budget_bytes - placement.context_bytes)
    pieces = DevicePieces(device) if placement.inside else None
    return OpenGpu(context, device, placement, config.miss, share, notes, promise, pieces)


def _words(speeds: Contended) -> str:
    bus, cpu = format_bytes(speeds.bus_bytes_per_s), format_bytes(speeds.cpu_bytes_per_s)
    return (
        "misses: each layer fetches some and the CPU computes the others, so both end together "
        f"(at the same time the bus moves {bus}/s and the CPU reads {cpu}/s)"
    )


def device_tier(
    gpu: OpenGpu,
    pool: SlotPool,
    shape: RoutingShape,
    policy: str,
    past: Eamc | None,
    math: TorchMath,
    host: HostTier,
) -> DeviceTier:
    """Build the tier above a store's host tier, with slots in `pool`. Raises DeviceError."""
    cells, slots = shape.layers * shape.experts, gpu.placement.slots

    def make_policy(slots: int) -> Policy:
        name = "lru" if slots >= cells else policy  # all fit: a policy would only cost time
        return POLICIES[name](Setup(shape, slots, past if name in USE_PAST else None))

    lock = HostLock(gpu.context, pool, SLICE_BYTES)
    return DeviceTier(
        gpu.context, lock, gpu.device, slots, make_policy, math, host,
        memory_bytes=gpu.placement.budget_bytes - gpu.placement.context_bytes,
        inside=gpu.placement.inside,
        lock_pages=lambda: PageLocking(lock, pool.slots, available_bytes, _HOST_HEADROOM_BYTES),
    )  # fmt: skip
