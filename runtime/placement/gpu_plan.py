"""Divide a device's memory within --device-memory.

The plan guarantees:

    context + workspace + dense weights + KV cache + arena ≤ --device-memory

The context is measured if NVML reports per-process memory. The code of kernels loaded later is
assumed. We allocate the rest, and torch is limited to its part. gpu_budget.py checks the result.
Dense weights and KV cache are placed first, because every token reads them. If the least number of
slots does not fit beside them, they stay in RAM and a note reports it. The rest is expert slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from moeinf.errors import Unavailable
from moeinf.runtime.config import PREFILL_CHUNK
from moeinf.runtime.library.manifest import Manifest
from moeinf.runtime.machine.gpu import Gpu
from moeinf.runtime.sizes import MemorySize, format_bytes

CONTEXT_BYTES = 512 << 20  # of CUDA, with torch's and our kernels loaded, if it cannot be measured
CODE_BYTES = 128 << 20  # of those kernels, if the context without them is known: assumed
HEADROOM_BYTES = 256 << 20  # left to other programs, such as the desktop, by the default budget
_GRAPHS_BYTES = 64 << 20  # of CUDA graphs: a token's activations, and up to 32 MiB for cuBLAS
_TORCH_BYTES = 64 << 20  # blocks of 2 to 20 MiB that torch allocates, and up to 32 MiB for cuBLAS


class DeviceDoesNotFit(Unavailable, MemoryError):
    """--device-memory, or the device's free memory, is below the minimum."""

    code = "device_does_not_fit"
    hint = "more --device-memory, --device cpu, or the same command after you free device memory"

    def __init__(self, given_bytes: int, min_bytes: int) -> None:
        super().__init__(
            f"{format_bytes(given_bytes)} of device memory is too little: at least {min_bytes} "
            f"bytes ({format_bytes(min_bytes)}) are needed"
        )
        self.given_bytes, self.min_bytes = given_bytes, min_bytes


@dataclass(frozen=True)
class DevicePlacement:
    """The division of a device's memory for one engine, in bytes. gpu: the device's name."""

    gpu: str
    budget_bytes: int
    slots: int
    slot_bytes: int
    context_bytes: int
    workspace_bytes: int
    provenance: str  # of the budget
    context_why: str
    dense_bytes: int = 0  # 0: dense weights and KV cache stay in RAM
    kv_bytes: int = 0

    @property
    def arena_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def inside(self) -> bool:
        """True if dense weights and KV cache are on the device."""
        return self.dense_bytes > 0

    @property
    def peak_bytes(self) -> int:
        """The maximum that is held, within budget_bytes."""
        ours = self.arena_bytes + self.dense_bytes + self.kv_bytes
        return ours + self.context_bytes + self.workspace_bytes


class DeviceBudget:
    """A device's memory before it is divided. Raises DeviceDoesNotFit when it is too small.

    memory: a share is one of the device's total memory. Memory of other processes does not count as
    free. there_bytes: the maximum for --device-memory.
    """

    def __init__(self, manifest: Manifest, memory: MemorySize | None, gpu: Gpu) -> None:
        own = gpu.context_bytes
        self._context = CONTEXT_BYTES if own is None else own + CODE_BYTES
        self._context_why = "assumed"
        if own is not None:
            code = format_bytes(CODE_BYTES)
            self._context_why = f"{format_bytes(own)} by NVML's count, and {code} for code to come"
        there = gpu.free_bytes + (CONTEXT_BYTES if own is None else own)  # before our context
        self.there_bytes = there = min(there, gpu.total_bytes)
        if memory is None:
            self._usable, self._why = there - HEADROOM_BYTES, f"what {gpu.name} has free"
        else:
            asked = memory.of(gpu.total_bytes)
            self._usable, self._why = min(asked, there), "asked for"
            if asked > there:
                self._why = f"what {gpu.name} has free, of {format_bytes(asked)} asked for"
        self._manifest, self._gpu = manifest, gpu.name
        slots = manifest.slots
        self._least = min(slots.top_k, slots.experts) * slots.slot_bytes
        needed = self._context + workspace_bytes(manifest) + self._least
        if self._usable < needed:
            raise DeviceDoesNotFit(max(0, self._usable), needed)

    def spare_bytes(self, context: int) -> int:
        """Return the bytes for KV cache and further slots when dense weights are on the device.

        The least number of slots is already deducted. Negative: the dense weights do not fit.
        """
        fixed = self._context + dense_workspace_bytes(self._manifest, context)
        return self._usable - fixed - self._manifest.dense_bytes - self._least

    def place(self, context: int, kv_bytes: int) -> DevicePlacement:
        """Place dense weights and KV cache on the device if the least number of slots fits, too."""
        manifest = self._manifest
        inside = kv_bytes <= self.spare_bytes(context)
        workspace = (
            dense_workspace_bytes(manifest, context) if inside else workspace_bytes(manifest)
        )
        dense, kv = (manifest.dense_bytes, kv_bytes) if inside else (0, 0)
        slots = manifest.slots
        left = self._usable - self._context - workspace - dense - kv
        count = min(left // slots.slot_bytes, slots.experts)
        return DevicePlacement(
            self._gpu, self._usable, count, slots.slot_bytes, self._context, workspace, self._why,
            self._context_why, dense, kv,
        )  # fmt: skip

    def inside_bytes(self, context: int, kv_bytes: int) -> int:
        """Return the --device-memory, in bytes, that fits dense weights and KV cache."""
        return self._usable - self.spare_bytes(context) + kv_bytes


def workspace_bytes(manifest: Manifest) -> int:
    """Return the bytes that a prefill chunk computes with, and what torch always allocates.

    Each row needs its input, K outputs and K inner rows, in float32. Quantised activations need
    less than that.
    """
    hidden = manifest.hidden
    inner = hidden + manifest.top_k * (hidden + 2 * manifest.intermediate)
    return _chunk(manifest) * inner * 4 + _TORCH_BYTES


def dense_workspace_bytes(manifest: Manifest, context: int) -> int:
    """Return the workspace in bytes when attention also runs on the device.

    Added are a dozen rows of D in float32 for every token of a chunk, and a head's keys and values
    of `context` tokens. Encoder-decoders also need a mask of the tokens that each token sees.
    """
    chunk, seen = _chunk(manifest), 4 * context if manifest.encoder_layers else 0
    rows = chunk * (12 * manifest.hidden_width * 4 + seen)
    # Latent attention expands keys and values to 2 · nope + rope + v items: 448 for DeepSeek, here
    # 1,024.
    expanded = context * (4096 if manifest.dtype == "F32" else 2048)
    return workspace_bytes(manifest) + rows + expanded + _GRAPHS_BYTES


def _chunk(manifest: Manifest) -> int:
    return max(PREFILL_CHUNK, manifest.max_context if manifest.encoder_layers else 0)


def most_tokens(fits: Callable[[int], bool], step: int, most: int) -> int:
    """Return the largest multiple of `step` that fits, from `step` to `most` rounded up."""
    counts = range(2, -(-most // step) + 1)
    return step * (1 + bisect_left(counts, True, key=lambda count: not fits(count * step)))
