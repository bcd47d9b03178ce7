"""How much of a GPU's memory this process holds, CUDA's own part included, as NVML counts it.

Does not know what for. Importing it imports NVIDIA's bindings, not torch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pynvml

_ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)


class HeldMemory:
    """Of one GPU, counted from before this process had a context there."""

    def __init__(self, bus: str) -> None:
        """bus: the GPU's PCI address. Without NVML nothing is ever known."""
        self._device: Any = None
        with suppress(*_ERRORS):
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
            self._before = int(pynvml.nvmlDeviceGetMemoryInfo(device).used)
            self._device = device

    def now_bytes(self, least: int = 1) -> int | None:
        """Where processes are not told apart: what the device holds more than at first, whoever
        holds it. None: NVML is not there, or does not say. least: see of_process_bytes."""
        found = self.of_process_bytes(least)
        if found is None and self._device is not None:
            with suppress(*_ERRORS):
                found = int(pynvml.nvmlDeviceGetMemoryInfo(self._device).used) - self._before
        return found if found is not None and found >= least else None

    def of_process_bytes(self, least: int = 1) -> int | None:
        """None, too, where NVML does not tell processes apart (containers, WSL2).

        least: what is held for certain. In a container NVML may name our process with 0 bytes, or
        a stranger that has our number outside: less than this is no figure of ours.
        """
        if self._device is None:
            return None
        with suppress(*_ERRORS):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._device):
                used = process.usedGpuMemory
                if process.pid == os.getpid() and used is not None and used >= least:
                    return int(used)
        return None
