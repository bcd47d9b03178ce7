"""How fast a machine with a GPU can be at best, and what a token must take there at least.

Does not know rows or engines. All speeds are measured before an engine takes its part of the
device's memory: these measurements need some of it themselves.

The floor of a token is that of the simulator (docs/study.md): dense weights and the KV cache come
first, where they lie; then the device computes the experts it holds while bus and CPU divide the
others in the best way, and the longer of the two counts. What must be read from disk may come
beside all of it, but takes its time as well.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from moeinf.models.layers.moe import TorchMath
from moeinf.native import DeviceContext, set_compute_threads
from moeinf.offload.simulator.clock import DeviceSpeeds
from moeinf.runtime.jobs.bench import read_ceiling
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine import gpu as gpus
from moeinf.runtime.machine.bus_bench import measure_bus, measure_contended

_BYTES, _SUMS, _ROUNDS = 512 << 20, 16, 3


@dataclass(frozen=True)
class Speeds:
    """Bytes per second: over the bus with nothing else going on, of RAM by all threads, and of
    experts, all three ways at once."""

    bus_bytes_per_s: float
    ram_bytes_per_s: float
    experts: DeviceSpeeds


@dataclass(frozen=True)
class TokenBytes:
    """What a decoded token has read: dense weights and KV cache, experts in device slots, the other
    experts, and from the disk."""

    dense: int
    hits: float
    missed: float
    disk: float


@dataclass(frozen=True)
class Floor:
    """The seconds of each part of a token."""

    dense_s: float
    device_s: float  # its experts
    experts_s: float  # those and the others, which bus and CPU divide
    disk_s: float

    @property
    def seconds(self) -> float:
        """The least that a token takes."""
        return max(self.dense_s + self.experts_s, self.disk_s)


def floor(took: TokenBytes, speeds: Speeds, inside: bool, disk_bytes_per_s: float | None) -> Floor:
    """inside: dense weights and KV cache lie on the device. None: nothing was read from disk."""
    device = speeds.experts.device_bytes_per_s
    return Floor(
        took.dense / (device if inside else speeds.ram_bytes_per_s),
        took.hits / device,
        speeds.experts.floor_seconds(took.hits, took.missed),
        took.disk / disk_bytes_per_s if disk_bytes_per_s is not None else 0.0,
    )


def measured(context: DeviceContext, manifest: Manifest, threads: int) -> Speeds:
    """Of this machine, for the experts of a model and an engine of so many threads."""
    device = device_ceiling()
    set_compute_threads(threads)
    bus, both = (
        measure_bus(context).bytes_per_s,
        measure_contended(context, manifest.expert_layout, TorchMath()),
    )
    experts = DeviceSpeeds(both.bus_bytes_per_s, both.cpu_bytes_per_s, device)
    return Speeds(bus, read_ceiling(threads), experts)


def device_ceiling() -> float:
    """Bytes per second that the device reads from its own memory, by sums over half a GiB that are
    queued together."""
    device = gpus.torch_device()
    x = torch.ones(_BYTES // 4, device=device.place)
    best = 0.0
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        sums = [x.sum() for _ in range(_SUMS)]
        float(sums[-1])
        best = max(best, _SUMS * _BYTES / (time.perf_counter() - start))
    del x
    device.release()
    return best
