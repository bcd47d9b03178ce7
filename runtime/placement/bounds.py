"""Compute how fast a plan can be at most, from bytes, products and measured speeds.

These are bounds. Everything that is not counted here costs more time. Routing is taken as uniformly
random; real routing repeats itself, so hits are more frequent.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moeinf.native import is_gated
from moeinf.offload.gpu_tier.miss_split import Miss
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.placement.bandwidth import Speeds
from moeinf.runtime.placement.plan import Placement

_DEVICE_FASTER = 32  # a device reads its own memory at most this many times as fast as RAM or a bus
# Numbers that one instruction multiplies at most, relative to float32: pairs of bfloat16, or four
# bytes in place of a float. Processors with AMX multiply bfloat16 in tiles.
_PRODUCTS = {"F32": 1, "BF16": 2}
_PRODUCTS_QUANTISED, _PRODUCTS_AMX = 4, 16


def without_misses(placement: Placement, manifest: Manifest) -> Placement:
    """Return the placement as if every expert had a slot in RAM."""
    return replace(placement, slots=manifest.slots.experts)


def seconds_per_token(
    placement: Placement,
    manifest: Manifest,
    speeds: Speeds,
    miss: Miss = "auto",
    bus_bytes_per_s: float | None = None,
) -> float:
    """Return the seconds per decoded token from memory traffic alone, with uniform random routing.

    Every byte of the dense weights and of L·K experts is read from RAM. The share of the experts
    without a slot is read from disk first. An encoder is not counted, because it runs once.
    Weights on a device are not read from RAM; the time that the device needs for them is unknown.
    The bus, the CPU, or both at once read the other experts. An unmeasured bus counts as infinitely
    fast for `fetch`, and as absent for `auto`. The result is 0 if so much is on the device that the
    unknown time decides.
    """
    slots, above = manifest.slots, placement.on_device
    layers = manifest.layers - manifest.encoder_layers
    dense = manifest.dense_bytes * layers / manifest.layers
    routed = layers * manifest.top_k * manifest.read_bytes
    disk = routed * (1 - placement.slots / slots.experts) / speeds.disk_bytes_per_s
    inside = above is not None and above.inside
    ram = 0.0 if inside else dense / speeds.ram_bytes_per_s
    if above is None:
        return ram + routed / speeds.ram_bytes_per_s + disk
    below = 1 - above.slots / slots.experts
    bus = bus_bytes_per_s or (math.inf if miss == "fetch" else 0.0)
    cpu = 0.0 if miss == "fetch" else speeds.ram_bytes_per_s
    rate = cpu if miss == "compute" else bus + cpu
    seconds = ram + routed * below / rate + disk * below
    on_device = routed * (1 - below) + (dense if inside else 0)
    if on_device > _DEVICE_FASTER * speeds.ram_bytes_per_s * seconds:
        return 0.0  # the device's own time decides, and it is not measured
    return seconds


def prefill_seconds(
    placement: Placement, manifest: Manifest, speeds: Speeds, tokens: int
) -> float | None:
    """Return the least seconds for a prompt of `tokens` tokens; None with a GPU.

    A chunk reads the dense weights, and a window each expert that one of its tokens uses. Experts
    without a slot come from disk. Only the products of routed experts count. Reads of RAM, reads of
    the disk and products may overlap, so the slowest of them is the bound.
    """
    if placement.on_device is not None:
        return None
    encoder = manifest.encoder_layers
    layers = encoder or manifest.layers
    chunk = tokens if encoder else PREFILL_CHUNK  # a source is read in one chunk
    size = tokens if encoder else placement.window
    windows = [min(size, tokens - start) for start in range(0, tokens, size)]
    unused = 1 - min(1.0, manifest.top_k / manifest.experts)  # the chance for one token
    used = sum(layers * manifest.experts * (1 - unused**window) for window in windows)
    routed = used * manifest.read_bytes
    dense = math.ceil(tokens / chunk) * manifest.dense_bytes * layers / manifest.layers
    missing = 1 - placement.slots / manifest.slots.experts
    least = [
        (routed + dense) / speeds.ram_bytes_per_s,
        routed * missing / speeds.disk_bytes_per_s,
    ]
    if speeds.products_per_s is not None:
        factor = _PRODUCTS.get(manifest.dtype, _PRODUCTS_QUANTISED)
        if manifest.dtype == "BF16" and speeds.has_amx:
            factor = _PRODUCTS_AMX
        products = tokens * layers * manifest.top_k * _expert_products(manifest)
        least.append(products / (factor * speeds.products_per_s))
    return max(least)


def _expert_products(manifest: Manifest) -> int:
    """Return the products of one expert for one token: one for each weight."""
    matrices = 3 if is_gated(manifest.activation) else 2
    return matrices * manifest.hidden * manifest.intermediate
