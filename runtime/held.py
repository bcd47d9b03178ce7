"""How much of a GPU's memory this process holds, CUDA's own part included, as NVML counts it.

Does not know what for. Importing it imports NVIDIA's bindings, not torch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pynvml


class HeldMemory:
    """Of one GPU, counted from before this process had a context there."""

    def __init__(self, bus: str) -> None:
        """bus: the GPU's PCI address. Without NVML nothing is ever known."""
        self._device: Any = None
        self.peak_bytes = 0  # of all that now_bytes has said
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
            self._before = int(pynvml.nvmlDeviceGetMemoryInfo(device).used)
            self._device = device

    def now_bytes(self) -> int | None:
        """Where processes are not told apart: what the device holds more than at first, whoever
        holds it. None: NVML is not there, or does not say."""
        found = self.of_process_bytes()
        if found is None and self._device is not None:
            with suppress(pynvml.NVMLError):
                used = int(pynvml.nvmlDeviceGetMemoryInfo(self._device).used)
                found = max(0, used - self._before)
        self.peak_bytes = max(self.peak_bytes, found or 0)
        return found

    def of_process_bytes(self) -> int | None:
        """None, too, where NVML does not tell processes apart (containers, WSL2)."""
        if self._device is None:
            return None
        with suppress(pynvml.NVMLError):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._device):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
        return None
