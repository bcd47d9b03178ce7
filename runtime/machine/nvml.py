"""Read from NVML how much memory this process holds on a GPU, CUDA's own part included.

This module imports NVIDIA's bindings, not torch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pynvml

_ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)


class HeldMemory:
    """Memory held on one GPU, counted from before this process had a context there."""

    def __init__(self, bus: str) -> None:
        """Open the GPU with the PCI address `bus`. Without NVML, every figure is unknown (None)."""
        self._device: Any = None
        with suppress(*_ERRORS):
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByPciBusId(bus)
            self._before = int(pynvml.nvmlDeviceGetMemoryInfo(device).used)
            self._device = device

    def now_bytes(self, least: int = 1) -> int | None:
        """Return the bytes that this process holds; None without NVML or below `least`.

        If NVML cannot tell processes apart, this is the growth of the device's used memory since
        the constructor. It then includes other processes. least: see of_process_bytes.
        """
        found = self.of_process_bytes(least)
        if found is None and self._device is not None:
            with suppress(*_ERRORS):
                found = int(pynvml.nvmlDeviceGetMemoryInfo(self._device).used) - self._before
        return found if found is not None and found >= least else None

    def of_process_bytes(self, least: int = 1) -> int | None:
        """Return the bytes of this process; None if NVML is missing or cannot tell processes apart.

        It cannot in containers and in WSL2. least: bytes that are certainly held. In a container
        NVML may report 0 bytes for our process, or another process with the same number outside. So
        a smaller figure is not ours.
        """
        if self._device is None:
            return None
        with suppress(*_ERRORS):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._device):
                used = process.usedGpuMemory
                if process.pid == os.getpid() and used is not None and used >= least:
                    return int(used)
        return None
