"""Where a model's parts go on this machine, and what that lets one expect.

Does not load anything. Sizes come from the manifest; speeds are measured here or remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moeinf.offload.budget import DoesNotFit
from moeinf.offload.split import Miss
from moeinf.runtime.config import PREFILL_CHUNK, EngineConfig
from moeinf.runtime.device_plan import DevicePlacement, place_on_device
from moeinf.runtime.manifest import Manifest
from moeinf.runtime.measure import Speeds
from moeinf.runtime.processor import choose_processor
from moeinf.runtime.sizes import format_bytes

HEADROOM_BYTES = 1 << 30  # left to the rest of the machine by the default budget
OVERHEAD_BYTES = 64 << 20  # the process beyond imports, dense weights, KV cache and experts
_CONTEXT_STEP = 256
_CONTEXT_SHARE = 0.25  # of the free memory goes to the KV cache unless --ctx says otherwise


class BadContext(ValueError):
    """A context was asked for that the model does not have."""


@dataclass(frozen=True)
class Placement:
    """How one engine will use memory, in bytes, and one line for each choice that was made."""

    memory_bytes: int  # budget for experts
    slots: int
    slot_bytes: int
    min_memory_bytes: int
    context: int
    kv_bytes: int
    dense_bytes: int
    scratch_bytes: int
    threads: int
    device: str = "cpu"
    on_device: DevicePlacement | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def experts_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def peak_bytes(self) -> int:
        """The most the process will hold beyond its imports."""
        return self.experts_bytes + self.dense_bytes + self.kv_bytes + self.scratch_bytes


def place(manifest: Manifest, config: EngineConfig, available_bytes: int, cores: int) -> Placement:
    """Decides context, slots and threads. available_bytes: other engines' claims are deducted.

    Raises DoesNotFit when the experts get less than min_memory_bytes, BadContext,
    DeviceUnavailable, DeviceDoesNotFit.
    """
    processor = choose_processor(config.device, config.device_memory, config.libcuda)
    notes = [str(processor)]
    slots, on_device = manifest.slots, None
    if processor.gpu is not None:
        on_device = place_on_device(manifest, config.device_memory, processor.gpu)
        promised = f"{format_bytes(on_device.peak_bytes)} of {format_bytes(on_device.budget_bytes)}"
        notes.append(
            f"device memory {promised} ({on_device.provenance}): {on_device.slots} experts, "
            f"workspace, and {format_bytes(on_device.context_bytes)} assumed for CUDA itself"
        )
    scratch = OVERHEAD_BYTES + working_bytes(manifest)
    fixed = manifest.dense_bytes + scratch + HEADROOM_BYTES
    asked = config.memory.of(slots.max_bytes) if config.memory is not None else None
    if config.context is None:
        left = available_bytes - fixed
        share = left * _CONTEXT_SHARE if asked is None else left - min(asked, slots.max_bytes)
        affordable = max(0, int(share) - config.parallel * manifest.state_bytes)
        per_token = config.parallel * manifest.kv_bytes_per_token
        tokens = affordable // per_token // _CONTEXT_STEP * _CONTEXT_STEP
        context = min(manifest.max_context, max(tokens, _CONTEXT_STEP))
        why = "the model's" if context == manifest.max_context else "what memory affords"
        notes.append(f"context {context} tokens ({why})")
    else:
        context = config.context
        if context > manifest.max_context:
            raise BadContext(
                f"{manifest.model} has a context of {manifest.max_context} tokens, "
                f"not {config.context}"
            )
    kv = config.parallel * manifest.kv_bytes(context)
    if config.memory is None:
        budget = min(slots.max_bytes, available_bytes - fixed - kv)
        if budget < slots.min_bytes:
            raise DoesNotFit(max(0, budget), slots.min_bytes)
        why = "all experts" if budget == slots.max_bytes else "what is free"
        notes.append(f"memory for experts {format_bytes(budget)} ({why})")
    else:
        budget = asked or 0
    count = slots.slots(budget)
    layer_width = manifest.layers * manifest.top_k
    if count < min(layer_width, slots.experts):
        notes.append(
            f"{count} slots are fewer than the {layer_width} experts that one token uses: "
            "every expert will be read anew for every token"
        )
    total = count * slots.slot_bytes + manifest.dense_bytes + kv + scratch
    if total > available_bytes:
        notes.append(
            f"{format_bytes(total)} will be needed in all, {format_bytes(available_bytes)} are "
            "free: the system may end this process; give less --memory or --ctx"
        )
    return Placement(
        memory_bytes=budget,
        slots=count,
        slot_bytes=slots.slot_bytes,
        min_memory_bytes=slots.min_bytes,
        context=context,
        kv_bytes=kv,
        dense_bytes=manifest.dense_bytes,
        scratch_bytes=scratch,
        threads=config.threads or min(cores, threads_worth_having(manifest)),
        device=processor.name,
        on_device=on_device,
        notes=tuple(notes),
    )


def working_bytes(manifest: Manifest) -> int:
    """What a prefill chunk computes with: K rows per token twice, and a few rows in float32.

    A source is read whole: every token of it sees all others.
    """
    chunk = max(PREFILL_CHUNK, manifest.max_context if manifest.encoder_layers else 0)
    return chunk * manifest.hidden * (manifest.top_k * 8 + 8 * 4)


def threads_worth_having(manifest: Manifest) -> int:
    """One thread per MiB that a layer reads for a token: below that, threads only wait.

    Measured with the demo (0.34 MiB a layer): 1 thread decodes 2.0 times as fast as 2 threads, and
    some 80 times as fast when another process keeps the second core busy (docs/log.md).
    """
    routed = manifest.layers * manifest.top_k * manifest.slots.slot_bytes
    per_layer = (manifest.dense_bytes + routed) // manifest.layers
    return max(1, per_layer >> 20)


def seconds_per_token(
    placement: Placement,
    manifest: Manifest,
    speeds: Speeds,
    miss: Miss = "auto",
    bus_bytes_per_s: float | None = None,
) -> float:
    """What memory traffic alone costs one decoded token, if routing were uniformly random.

    Every byte of the dense weights and of L·K experts is read from RAM; of the experts, the share
    that has no slot is read from disk first. Real routing repeats itself: hits are more frequent.
    Experts in device slots are not read from RAM, and what the device itself takes for them is
    unknown; the others are read by the bus, by the CPU, or by both at once. A bus that was never
    measured counts as infinitely fast to fetch, and not at all to `auto`.
    """
    slots, above = manifest.slots, placement.on_device
    routed = manifest.layers * manifest.top_k * slots.slot_bytes
    disk = routed * (1 - placement.slots / slots.experts) / speeds.disk_bytes_per_s
    ram = manifest.dense_bytes / speeds.ram_bytes_per_s
    if above is None:
        return ram + routed / speeds.ram_bytes_per_s + disk
    below = 1 - above.slots / slots.experts
    bus = bus_bytes_per_s or (math.inf if miss == "fetch" else 0.0)
    cpu = 0.0 if miss == "fetch" else speeds.ram_bytes_per_s
    rate = cpu if miss == "compute" else bus + cpu
    return ram + routed * below / rate + disk * below
