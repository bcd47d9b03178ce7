"""What goes into a device's memory, and that it stays within --device-memory.

Does not load anything, nor know the host's memory (plan.py). What is promised:

    context + workspace + arena ≤ --device-memory       context: assumed; all else: allocated by us

Attention, dense weights and the KV cache stay in the host's memory: only routed experts are here.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.gpu import Gpu
from moeinf.runtime.manifest import Manifest
from moeinf.runtime.sizes import MemorySize, format_bytes

CONTEXT_BYTES = 512 << 20  # of CUDA, with torch's and our kernels loaded: assumed, not measured
HEADROOM_BYTES = 256 << 20  # left to others, the desktop say, by the default budget


class DeviceDoesNotFit(MemoryError):
    """--device-memory, or what the device has free, is below the least that works."""

    def __init__(self, given_bytes: int, min_bytes: int) -> None:
        super().__init__(
            f"{format_bytes(given_bytes)} of device memory is too little: at least {min_bytes} "
            f"bytes ({format_bytes(min_bytes)}) are needed"
        )
        self.given_bytes, self.min_bytes = given_bytes, min_bytes


@dataclass(frozen=True)
class DevicePlacement:
    """How one engine will use a device's memory, in bytes. gpu: its name."""

    gpu: str
    budget_bytes: int
    slots: int
    slot_bytes: int
    context_bytes: int
    workspace_bytes: int
    provenance: str  # of the budget

    @property
    def arena_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is held, within budget_bytes."""
        return self.arena_bytes + self.context_bytes + self.workspace_bytes


def place_on_device(manifest: Manifest, memory: MemorySize | None, gpu: Gpu) -> DevicePlacement:
    """As many slots as the budget has room for. Raises DeviceDoesNotFit.

    A share is one of the device's whole memory. What others hold is not counted as free.
    """
    slots, workspace = manifest.slots, workspace_bytes(manifest)
    there = gpu.free_bytes + CONTEXT_BYTES  # what was free before our context
    if memory is None:
        budget, why = there - HEADROOM_BYTES, f"what {gpu.name} has free"
    else:
        budget, why = memory.of(gpu.total_bytes), "asked for"
    fixed = CONTEXT_BYTES + workspace
    count = min((min(budget, there) - fixed) // slots.slot_bytes, slots.experts)
    least = min(slots.top_k, slots.experts)
    if count < least:
        raise DeviceDoesNotFit(max(0, min(budget, there)), fixed + least * slots.slot_bytes)
    return DevicePlacement(
        gpu.name, budget, count, slots.slot_bytes, CONTEXT_BYTES, workspace, why
    )  # fmt: skip


def workspace_bytes(manifest: Manifest) -> int:
    """What a prefill chunk computes with: its rows, K outputs each, and K inner rows, in float32.

    Quantised activations take less than the float32 that is counted for them.
    """
    chunk = max(PREFILL_CHUNK, manifest.max_context if manifest.encoder_layers else 0)
    layout = manifest.expert_layout
    inner = layout.hidden + manifest.top_k * (layout.hidden + 2 * layout.intermediate)
    return chunk * inner * 4
