"""The highest speeds of a machine with a GPU, and the shortest time of a token there.

All speeds are measured before an engine takes its part of the device's memory, because these
measurements need some of it themselves.

The floor of a token is that of the simulator (docs/study.md). Dense weights and the KV cache come
first, in the memory where they are. Then the device computes its resident experts while bus and CPU
divide the others in the best way; the longer of the two counts. Disk reads may overlap all of it,
but the floor is never below their time.
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
    """Bytes per second of the idle bus, of RAM, and of experts.

    RAM is read by all threads. The experts' three speeds are measured for all three ways at once.
    """

    bus_bytes_per_s: float
    ram_bytes_per_s: float
    experts: DeviceSpeeds


@dataclass(frozen=True)
class TokenBytes:
    """Bytes read per decoded token.

    dense: dense weights and KV cache; hits: experts in device slots; missed: the other experts;
    disk: from the disk.
    """

    dense: int
    hits: float
    missed: float
    disk: float


@dataclass(frozen=True)
class Floor:
    """The seconds of each part of a token."""

    dense_s: float
    device_s: float  # its experts
    experts_s: float  # those, and the misses that bus and CPU divide
    disk_s: float

    @property
    def seconds(self) -> float:
        """The shortest time of a token."""
        return max(self.dense_s + self.experts_s, self.disk_s)


def floor(took: TokenBytes, speeds: Speeds, inside: bool, disk_bytes_per_s: float | None) -> Floor:
    """Return the floor; inside: dense weights and KV cache are on the device.

    disk_bytes_per_s: None when nothing was read from disk.
    """
    device = speeds.experts.device_bytes_per_s
    return Floor(
        took.dense / (device if inside else speeds.ram_bytes_per_s),
        took.hits / device,
        speeds.experts.floor_seconds(took.hits, took.missed),
        took.disk / disk_bytes_per_s if disk_bytes_per_s is not None else 0.0,
    )


def measured(context: DeviceContext, manifest: Manifest, threads: int) -> Speeds:
    """Measure this machine, for a model's experts and an engine of `threads` threads."""
    device = device_ceiling()
    set_compute_threads(threads)
    bus, both = (
        measure_bus(context).bytes_per_s,
        measure_contended(context, manifest.expert_layouts[0], TorchMath()),
    )
    experts = DeviceSpeeds(both.bus_bytes_per_s, both.cpu_bytes_per_s, device)
    return Speeds(bus, read_ceiling(threads), experts)


def device_ceiling() -> float:
    """Return the bytes per second that the device reads from its own memory.

    Measured by sums over half a GiB that are queued together.
    """
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
